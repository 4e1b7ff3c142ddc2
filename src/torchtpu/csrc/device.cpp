// Devices as PyTorch sees them: guard, streams, events and hooks.
//
// The runtime has no streams a user could order by hand: XLA orders programs by their data. A stream is a label, waiting for a
// stream waits for its device, and an event remembers what was enqueued when it was recorded.
#include "callbacks.h"
#include "storage.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Event.h>

#include <pthread.h>

#include <atomic>
#include <vector>

namespace py = pybind11;

namespace torchtpu {
namespace {

Callbacks* g_callbacks = nullptr;  // leaked: used until the very end of the process
std::atomic<bool> g_initialised{false};
std::atomic<bool> g_bad_fork{false};
std::atomic<int> g_count{-1};  // fixed once the runtime has started
std::atomic<c10::StreamId> g_next_stream{1};

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kTPU, device), id);
}

thread_local c10::DeviceIndex t_device = 0;
thread_local std::vector<c10::StreamId> t_streams;  // current stream by device; 0 is the default stream

void after_fork_in_child() {
  if (g_initialised.exchange(false)) g_bad_fork = true;
}

c10::StreamId& current_stream_id(c10::DeviceIndex device) {
  const auto i = static_cast<size_t>(device);
  if (i >= t_streams.size()) t_streams.resize(i + 1, 0);
  return t_streams[i];
}

struct TpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTPU; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = t_device;
    setDevice(device);
    return {kTPU, old};
  }
  c10::Device getDevice() const override { return {kTPU, t_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kTPU, "expected a tpu device, got ", device);
    if (device.index() == t_device) return;
    check_index(device.index());
    t_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = resolve_index(device.index());
    return make_stream(index, current_stream_id(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(resolve_index(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return make_stream(resolve_index(device.index()), g_next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    check_index(stream.device_index());
    auto& current = current_stream_id(stream.device_index());
    const auto old = make_stream(stream.device_index(), current);
    current = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  // What XLA has a type for; quantised and bit-packed types are not among it.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    auto& has = capability.capability_data.supported_scalar_types;
    has.has_Bool = has.has_Byte = has.has_Char = has.has_Short = has.has_Int = has.has_Long = 1;
    has.has_UInt16 = has.has_UInt32 = has.has_UInt64 = 1;
    has.has_Half = has.has_BFloat16 = has.has_Float = has.has_Double = has.has_ComplexFloat = has.has_ComplexDouble = 1;
    has.has_Float8_e4m3fn = has.has_Float8_e4m3fnuz = has.has_Float8_e5m2 = has.has_Float8_e5m2fnuz = has.has_Float8_e8m0fnu = 1;
    return capability;
  }

  bool queryStream(const c10::Stream& stream) const override {
    if (!is_initialised()) return true;
    py::gil_scoped_acquire gil;
    return callbacks().query(stream.device_index()).cast<bool>();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronizeDevice(stream.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const auto index = resolve_index(device);
    if (!is_initialised()) return check_fork();
    py::gil_scoped_acquire gil;
    callbacks().synchronize(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "an event of device ", static_cast<int>(device), " cannot be recorded on a stream of device ",
        static_cast<int>(stream.device_index()));
    ensure_initialised();
    py::gil_scoped_acquire gil;
    auto fresh = callbacks().record_event(stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT);
    auto* old = static_cast<PyObject*>(*event);
    *event = fresh.release().ptr();
    Py_XDECREF(old);
  }
  void block(void*, const c10::Stream&) const override {}  // data dependencies already order the programs
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    py::gil_scoped_acquire gil;
    return callbacks().query_event(handle(event)).cast<bool>();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    py::gil_scoped_acquire gil;
    callbacks().synchronize_event(handle(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "both events must be recorded before the time between them can be measured");
    py::gil_scoped_acquire gil;
    return callbacks().elapsed_time(handle(start), handle(end)).cast<double>();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr || !interpreter_usable()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(event));
  }

 private:
  static py::handle handle(void* event) { return static_cast<PyObject*>(event); }
  static void check_fork() {
    if (in_bad_fork()) ensure_initialised();  // raises
  }
};

struct TpuHooks final : at::PrivateUse1HooksInterface {
  // A no-op: PyTorch calls it under a call_once (pinning memory, making a generator), where waiting for the GIL could deadlock,
  // and neither needs the runtime. The first allocation starts it.
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override {
    if (g_callbacks == nullptr || !interpreter_usable()) return false;
    py::gil_scoped_acquire gil;
    try {
      return callbacks().is_available().cast<bool>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch.tpu.is_available");
      return false;
    }
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return is_initialised() && device >= 0 && device < device_count();
  }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    t_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = t_device;
    if (device != old) setCurrentDevice(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const auto index = device_of_address(pointer);
    TORCH_CHECK(index >= 0, "the address ", pointer, " does not belong to a tpu tensor");
    return {kTPU, index};
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, TpuGuard);

void set_callbacks(const py::dict& functions) {
  auto* table = new Callbacks;
  const auto take = [&](const char* name, py::object& slot) {
    TORCH_CHECK(functions.contains(name), "set_callbacks: '", name, "' is missing");
    slot = functions[name];
  };
  take("initialise", table->initialise);
  take("device_count", table->device_count);
  take("is_available", table->is_available);
  take("synchronize", table->synchronize);
  take("query", table->query);
  take("memory_info", table->memory_info);
  take("record_event", table->record_event);
  take("query_event", table->query_event);
  take("synchronize_event", table->synchronize_event);
  take("elapsed_time", table->elapsed_time);
  delete g_callbacks;
  g_callbacks = table;
}

}  // namespace

const Callbacks& callbacks() {
  TORCH_CHECK(g_callbacks != nullptr, "the torchtpu extension was loaded without torchtpu: import torchtpu");
  return *g_callbacks;
}

bool is_initialised() { return g_initialised.load(std::memory_order_acquire); }
bool in_bad_fork() { return g_bad_fork.load(std::memory_order_relaxed); }

bool interpreter_usable() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool finalising = Py_IsFinalizing();
#else
  const bool finalising = _Py_IsFinalizing();
#endif
  return Py_IsInitialized() && !finalising && !in_bad_fork();
}

void ensure_initialised() {
  if (is_initialised()) return;
  py::gil_scoped_acquire gil;
  const int count = callbacks().initialise().cast<int>();
  if (count < 0) return;  // this thread is starting the runtime at the moment, and may make tensors meanwhile
  g_count = count;
  g_initialised.store(true, std::memory_order_release);
}

c10::DeviceIndex device_count() noexcept {
  const int known = g_count.load(std::memory_order_relaxed);
  if (known >= 0) return static_cast<c10::DeviceIndex>(known);
  if (g_callbacks == nullptr || !interpreter_usable()) return 0;
  py::gil_scoped_acquire gil;
  try {
    return static_cast<c10::DeviceIndex>(callbacks().device_count().cast<int>());
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch.tpu.device_count");
    return 0;
  }
}

c10::DeviceIndex current_device() noexcept { return t_device; }

void check_index(c10::DeviceIndex index) {
  const auto count = device_count();
  TORCH_CHECK(
      index >= 0 && index < count, "tpu: invalid device ordinal ", static_cast<int>(index), ": this process has ",
      static_cast<int>(count), count == 1 ? " tpu device" : " tpu devices",
      " (on XLA:CPU, TORCHTPU_CPU_DEVICES=N in the environment makes N of them)");
}

c10::DeviceIndex resolve_index(c10::DeviceIndex index) {
  if (index < 0) return t_device;
  check_index(index);
  return index;
}

void bind_device(py::module_& module) {
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  at::RegisterPrivateUse1HooksInterface(new TpuHooks());
  module.def("set_callbacks", &set_callbacks, py::arg("callbacks"), "Give C++ the Python functions of the runtime.");
  module.def("initialise", &ensure_initialised, "Start the runtime unless it runs already.");
  module.def("is_initialised", &is_initialised, "Whether the runtime has started.");
  module.def("in_bad_fork", &in_bad_fork, "Whether this process was forked from one that had started the runtime.");
  module.def("device_count", [] { return static_cast<int>(device_count()); }, "Number of devices, without starting them.");
  module.def("current_device", [] { return static_cast<int>(t_device); }, "The device current in this thread.");
  module.def("exchange_device", [](int device) {
    const int old = t_device;
    if (device >= 0 && device != old) {
      check_index(static_cast<c10::DeviceIndex>(std::min(device, 127)));
      t_device = static_cast<c10::DeviceIndex>(device);
    }
    return old;
  }, py::arg("device"), "Make a device current in this thread (no-op if negative); returns the one before.");
  module.def("elapsed_time", [](const py::object& start, const py::object& end) {
    for (const auto& event : {start, end})
      TORCH_CHECK_TYPE(
          PyObject_TypeCheck(event.ptr(), reinterpret_cast<PyTypeObject*>(THPEventClass)), "expected a torch.Event");
    return reinterpret_cast<THPEvent*>(start.ptr())->event.elapsedTime(reinterpret_cast<THPEvent*>(end.ptr())->event);
  }, py::arg("start"), py::arg("end"),
     "Milliseconds between two events. torch.Event's own method refuses events of derived classes.");
  module.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); },
             py::arg("device"), "The device's default generator.");
}

}  // namespace torchtpu
