// Which implementation scaled_dot_product_attention takes on this device.
#include "storage.h"

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>

namespace torchtpu {
namespace {

// One program for the whole of attention, unless the user has switched that backend off or the arguments are not the usual four
// dimensions of real numbers; then PyTorch composes it from matmul and softmax. Who asks for the memory-efficient kernel and not
// for ours gets that operator, which is one program too: PyTorch's context parallelism knows it.
int64_t choose(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const bool usual = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.is_floating_point() && !query.is_nested();
  const auto& user = at::globalContext();
  if (usual && user.userEnabledOverrideableSDP()) return static_cast<int64_t>(at::SDPBackend::overrideable);
  const bool efficient = usual && !mask.has_value() && user.userEnabledMemEfficientSDP();
  return static_cast<int64_t>(efficient ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

}  // namespace
}  // namespace torchtpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &torchtpu::choose)
}
