// The c10d backend as PyTorch's C++ sees it: every call goes to a Python object, whose methods return Python work handles.
//
// PyTorch lets Python derive from ProcessGroup, which leaves out half of the collectives, but not from Backend; and C++ (DDP's
// reducer, functional collectives) keeps only C++ objects alive. Both classes here own their Python object.
#include "storage.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

// DDP notes when its phases begin and end, by the host's clock: it warns about devices without a timer.
namespace c10d {
namespace {

class TpuTimer final : public Timer {
 public:
  explicit TpuTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to <= from) return std::nullopt;
    return to - from;
  }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, TpuTimer);

}  // namespace
}  // namespace c10d

namespace torchtpu {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Milliseconds = std::chrono::milliseconds;
template <typename T>
using Pointer = c10::intrusive_ptr<T>;

// A Python object that may be dropped by a thread without the GIL, or at exit.
class Owned {
 public:
  explicit Owned(py::object object) : object_(std::move(object)) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  template <typename... Args>
  py::object call(const char* method, Args&&... args) const {
    return object_.attr(method)(std::forward<Args>(args)...);
  }
  const py::object& get() const { return object_; }

 private:
  py::object object_;
};

// wait(seconds or None), is_completed(), exception(), result(), get_future(), source_rank(): what a work handle must have.
class TpuWork final : public c10d::Work {
 public:
  explicit TpuWork(py::object work) : work_(std::move(work)) {}

  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return work_.call("is_completed").cast<bool>();
  }
  bool isSuccess() const override {
    py::gil_scoped_acquire gil;
    return work_.call("is_completed").cast<bool>() && work_.call("exception").is_none();
  }
  std::exception_ptr exception() const override {
    py::gil_scoped_acquire gil;
    const auto error = work_.call("exception");
    if (error.is_none()) return nullptr;
    return std::make_exception_ptr(std::runtime_error(py::str(error).cast<std::string>()));
  }
  int sourceRank() const override {
    py::gil_scoped_acquire gil;
    return work_.call("source_rank").cast<int>();
  }
  Tensors result() override {
    py::gil_scoped_acquire gil;
    return work_.call("result").cast<Tensors>();
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(Milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    const py::object seconds = timeout.count() > 0 ? py::object(py::float_(timeout.count() / 1e3)) : py::none();
    work_.call("wait", seconds);
    return true;
  }
  Pointer<c10::ivalue::Future> getFuture() override {
    py::gil_scoped_acquire gil;
    return work_.call("get_future").cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  }

 private:
  Owned work_;
};

class TpuBackend final : public c10d::Backend {
 public:
  TpuBackend(int rank, int size, std::string name, Milliseconds timeout, py::object python)
      : Backend(rank, size), name_(std::move(name)), python_(std::move(python)),
        options_(c10::make_intrusive<Options>(name_, timeout)) {
    init();
  }

  const std::string getBackendName() const override { return name_; }
  Pointer<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  py::object python() const { return python_.get(); }

  void setTimeout(Milliseconds timeout) override {
    options_->timeout = timeout;
    call("set_timeout", timeout.count() / 1e3);
  }
  void startCoalescing() override { call("start_coalescing"); }
  Pointer<c10d::Work> endCoalescing() override { return work("end_coalescing"); }

  Pointer<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return work("broadcast", tensors, o.rootRank, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return reducing("all_reduce", o.reduceOp, tensors, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return reducing("all_reduce", o.reduceOp, tensors, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return reducing("reduce", o.reduceOp, tensors, o.rootRank, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return work("all_gather", outputs, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    // One list per rank, each with a tensor per input; all_gather has one list per input.
    TensorLists turned(inputs.size());
    for (const auto& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "allgather_coalesced: every rank's list needs a tensor for each input");
      for (size_t i = 0; i < inputs.size(); ++i) turned[i].push_back(of_rank[i]);
    }
    return work("all_gather", turned, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    return work("all_gather_into_tensor", Tensors{output}, Tensors{input}, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return work("all_gather_into_tensor", outputs, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    return work("gather", outputs, inputs, o.rootRank, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) override {
    return work("scatter", outputs, inputs, o.rootRank, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& o) override {
    return reducing("reduce_scatter", o.reduceOp, outputs, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    return reducing("reduce_scatter_tensor", o.reduceOp, Tensors{output}, Tensors{input}, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    return reducing("reduce_scatter_tensor", o.reduceOp, outputs, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& o) override {
    return work("all_to_all_single", output, input, output_splits, input_splits, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    return work("all_to_all", outputs, inputs, o.asyncOp, seconds(o.timeout));
  }
  Pointer<c10d::Work> send(Tensors& tensors, int destination, int tag) override {
    return work("send", tensors, destination, tag);
  }
  Pointer<c10d::Work> recv(Tensors& tensors, int source, int tag) override { return work("recv", tensors, source, tag); }
  Pointer<c10d::Work> recvAnysource(Tensors& tensors, int tag) override { return work("recv", tensors, -1, tag); }
  Pointer<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    return work("barrier", o.asyncOp, seconds(o.timeout));
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    call("monitored_barrier", seconds(o.timeout), wait_all_ranks);
  }

  void setSequenceNumberForGroup() override {}  // every group counts from 0
  uint64_t getSequenceNumberForGroup() override {
    py::gil_scoped_acquire gil;
    return python_.call("sequence_number").cast<uint64_t>();
  }
  c10d::ErrorType getError() override {
    py::gil_scoped_acquire gil;
    return python_.call("failed").cast<bool>() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }
  Pointer<Backend> split(
      const Pointer<c10d::Store>& store, const std::vector<int>& ranks, const Pointer<Options>& o) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) return nullptr;
    const auto rank = static_cast<int>(place - ranks.begin());
    py::gil_scoped_acquire gil;
    auto part = python_.call("split", store, ranks, rank, o->timeout.count() / 1e3, o->group_name);
    return c10::make_intrusive<TpuBackend>(rank, static_cast<int>(ranks.size()), name_, o->timeout, std::move(part));
  }
  void abort() override { call("abort"); }
  void shutdown() override { call("shutdown"); }

 private:
  static std::optional<double> seconds(Milliseconds timeout) {
    if (timeout.count() <= 0) return std::nullopt;
    return timeout.count() / 1e3;
  }
  template <typename... Args>
  void call(const char* method, Args&&... args) {
    py::gil_scoped_acquire gil;
    python_.call(method, std::forward<Args>(args)...);
  }
  template <typename... Args>
  Pointer<c10d::Work> work(const char* method, Args&&... args) {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<TpuWork>(python_.call(method, std::forward<Args>(args)...));
  }
  // A reduction is the number of c10d::ReduceOp, and the factor of PREMUL_SUM (a number or a tensor of one element).
  template <typename... Args>
  Pointer<c10d::Work> reducing(const char* method, const c10d::ReduceOp& op, Args&&... args) {
    py::gil_scoped_acquire gil;
    py::object factor = py::none();
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      const auto* supplement = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      factor = supplement->tensor_factor.defined() ? py::cast(supplement->tensor_factor)
                                                   : py::object(py::float_(supplement->double_factor));
    }
    return c10::make_intrusive<TpuWork>(
        python_.call(method, static_cast<int>(op.op_), factor, std::forward<Args>(args)...));
  }

  const std::string name_;
  Owned python_;
  Pointer<Options> options_;
};

}  // namespace

void define_process_group(py::module_& module) {
  py::class_<TpuBackend, Pointer<TpuBackend>, c10d::Backend>(module, "ProcessGroupTPU")
      .def(
          py::init([](int rank, int size, std::string name, double timeout, py::object python) {
            const auto milliseconds = Milliseconds(static_cast<int64_t>(timeout * 1e3));
            return c10::make_intrusive<TpuBackend>(rank, size, std::move(name), milliseconds, std::move(python));
          }),
          py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("timeout"), py::arg("python"))
      .def("perform_nocolor_split", [](TpuBackend&, const py::object&) {},
           "What a rank outside a group that is split off has to do: nothing.")
      .def_property_readonly("python", &TpuBackend::python, "The object that runs the collectives.");
}

void bind_process_group(py::module_& module) {
  // PyTorch defines its Backend when torch.distributed is imported, which need not have happened yet.
  module.def("define_process_group", [module]() mutable {
    if (!py::hasattr(module, "ProcessGroupTPU")) define_process_group(module);
  }, "Define ProcessGroupTPU; torch.distributed must have been imported.");
}

}  // namespace torchtpu
