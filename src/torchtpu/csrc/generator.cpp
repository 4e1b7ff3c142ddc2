// Random numbers are counter-based: a generator is a seed and the number of draws taken from it so far. Both are operands of the
// programs that draw, so seeding and drawing compile nothing.
#include "callbacks.h"
#include "storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>

namespace torchtpu {
namespace {

constexpr int64_t kStateBytes = 16;  // seed, then offset, as CUDA lays its state out: DTensor edits it in place

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

class TpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit TpuGenerator(c10::DeviceIndex device, std::shared_ptr<State> state = std::make_shared<State>())
      : c10::GeneratorImpl(c10::Device(kTPU, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        state_(std::move(state)) {}

  void set_current_seed(uint64_t seed) override { *state_ = {seed, 0}; }
  uint64_t current_seed() const override { return state_->seed; }
  void set_offset(uint64_t offset) override { state_->offset = offset; }
  uint64_t get_offset() const override { return state_->offset; }
  uint64_t seed() override {
    const auto random = c10::detail::getNonDeterministicRandom();
    set_current_seed(random);
    return random;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.layout() == c10::Layout::Strided && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
        "RNG state must be a torch.ByteTensor on the CPU");
    TORCH_CHECK(
        state.numel() == kStateBytes && state.is_contiguous(), "RNG state of a tpu generator must be ", kStateBytes,
        " contiguous bytes (seed, offset), got ", state.numel(), state.is_contiguous() ? "" : " strided");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&state_->seed, bytes, sizeof(uint64_t));
    std::memcpy(&state_->offset, bytes + sizeof(uint64_t), sizeof(uint64_t));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto* bytes = static_cast<char*>(state.data_ptr());
    std::memcpy(bytes, &state_->seed, sizeof(uint64_t));
    std::memcpy(bytes + sizeof(uint64_t), &state_->offset, sizeof(uint64_t));
    return state.getIntrusivePtr();
  }

  // The "graph safe" pair shares the state itself instead of copying it.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* generator = dynamic_cast<TpuGenerator*>(other.get());
    TORCH_CHECK(generator != nullptr, "graphsafe_set_state expects a tpu generator");
    state_ = generator->state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<TpuGenerator>(device().index(), state_);
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    return new TpuGenerator(device().index(), std::make_shared<State>(*state_));
  }
  std::shared_ptr<State> state_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<TpuGenerator>(resolve_index(device)); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, 128>;
  static std::mutex mutex;
  const auto index = resolve_index(device);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& generator = (*generators)[static_cast<size_t>(index)];
  if (!generator.defined()) generator = at::make_generator<TpuGenerator>(index);
  return generator;
}

std::pair<uint64_t, uint64_t> reserve_draws(
    const std::optional<at::Generator>& generator, c10::DeviceIndex device, uint64_t count) {
  auto source = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(
      source.device().type() == kTPU, "Expected a 'tpu' device type for generator but found '", source.device().type(), "'");
  const std::lock_guard<std::mutex> lock(source.mutex());
  const std::pair<uint64_t, uint64_t> draws{source.current_seed(), source.get_offset()};
  source.set_offset(draws.second + count);
  return draws;
}

}  // namespace torchtpu
