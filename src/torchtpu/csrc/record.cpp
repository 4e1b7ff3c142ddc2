// Recording: the operators called on a device and not run yet. What is recorded, and when it runs, Python decides
// (torchtpu/eager/trace.py); an operator seen before is appended here.
#include "dispatch.h"

#include <structmember.h>

#include <array>

namespace py = pybind11;

namespace torchtpu {

// Arrays by identity, with the position at which each was first met.
class Slots {
 public:
  // The position of an array, which is `next` if it is new.
  int32_t find(const PyObject* array, int32_t next) {
    if (2 * (count_ + 1) > table_.size()) grow();
    auto& entry = probe(table_, array);
    if (entry.first == nullptr) {
      entry = {array, next};
      ++count_;
    }
    return entry.second;
  }

 private:
  using Entry = std::pair<const PyObject*, int32_t>;
  std::vector<Entry> table_{64, Entry{nullptr, 0}};
  size_t count_ = 0;

  static Entry& probe(std::vector<Entry>& table, const PyObject* array) {
    const size_t mask = table.size() - 1;
    size_t i = (reinterpret_cast<uintptr_t>(array) >> 4) * 0x9E3779B97F4A7C15u >> 32;
    while (table[i & mask].first != nullptr && table[i & mask].first != array) ++i;
    return table[i & mask];
  }
  void grow() {
    std::vector<Entry> larger(4 * table_.size(), Entry{nullptr, 0});
    for (const auto& entry : table_)
      if (entry.first != nullptr) probe(larger, entry.first) = entry;
    table_ = std::move(larger);
  }
};

struct TraceObject {
  PyObject_HEAD
  PyObject* programs;  // list, in order
  PyObject* arrays;    // list: values from outside
  PyObject* head;      // the first operand of the first program, if that is an array
  int32_t device;
  bool sealed;  // it is being run: nothing may be appended
  // Which program, on which earlier results (>= 0) and which arrays (< 0).
  std::vector<int32_t> signature;
  Slots slots;
  std::vector<double> floats;
  std::vector<int64_t> integers;
  std::vector<uint64_t> seeds;  // seed and offset of each
  std::vector<PendingObject*> results;  // borrowed; nullptr once nothing refers to a result any more
};

namespace {

// A trace at least this long ends where its first operator comes again on the same array: one iteration of a loop.
constexpr Py_ssize_t kLoop = 64;
// A trace at least this long ends where its first operator comes again on any array.
constexpr Py_ssize_t kLong = 2048;
// A trace ends here at the latest: compile time grows with it.
constexpr Py_ssize_t kLongest = 8192;

std::array<TraceObject*, 128> g_traces{};  // by device, owned

// Whether an optimizer is making its state: that ends the trace, so that what follows is the same at every step.
bool g_initialising = false;

PyTypeObject* g_pending_type = nullptr;
PyTypeObject* g_trace_type = nullptr;

// ---- Pending ----

void detach(PendingObject* p) {
  if (p->trace == nullptr) return;
  p->trace->results[static_cast<size_t>(p->index)] = nullptr;
  Py_CLEAR(p->trace);
}

int pending_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* p = reinterpret_cast<PendingObject*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(p->array);
  Py_VISIT(p->error);
  Py_VISIT(reinterpret_cast<PyObject*>(p->trace));
  return 0;
}

int pending_clear(PyObject* self) {
  auto* p = reinterpret_cast<PendingObject*>(self);
  detach(p);
  Py_CLEAR(p->array);
  Py_CLEAR(p->error);
  return 0;
}

void pending_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  pending_clear(self);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* is_ready(PyObject* self, PyObject*) {
  auto* p = reinterpret_cast<PendingObject*>(self);
  if (p->array == nullptr) Py_RETURN_FALSE;
  return PyObject_CallMethod(p->array, "is_ready", nullptr);
}

PyMemberDef g_pending_members[] = {
    {"array", T_OBJECT, offsetof(PendingObject, array), READONLY, "The value once computed, else None."},
    {"error", T_OBJECT, offsetof(PendingObject, error), READONLY, "Why it could not be computed."},
    {"trace", T_OBJECT, offsetof(PendingObject, trace), READONLY, "The trace; None once computed."},
    {"index", T_INT, offsetof(PendingObject, index), READONLY, "Its number among the trace's results."},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef g_pending_methods[] = {
    {"is_ready", is_ready, METH_NOARGS, "Whether the value is there, as with a jax.Array."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot g_pending_slots[] = {
    {Py_tp_doc, const_cast<char*>("A value that a trace will compute.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(pending_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(pending_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(pending_clear)},
    {Py_tp_members, g_pending_members},
    {Py_tp_methods, g_pending_methods},
    {0, nullptr},
};
PyType_Spec g_pending_spec = {
    "torchtpu._C.Pending", sizeof(PendingObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, g_pending_slots};

// ---- Trace ----

TraceObject* as_trace(PyObject* x) { return reinterpret_cast<TraceObject*>(x); }

TraceObject* new_trace(c10::DeviceIndex device) {
  auto* t = PyObject_GC_New(TraceObject, g_trace_type);
  if (t == nullptr) throw py::error_already_set();
  t->programs = PyList_New(0);
  t->arrays = PyList_New(0);
  t->head = nullptr;
  t->device = device;
  t->sealed = false;
  new (&t->signature) std::vector<int32_t>();
  new (&t->slots) Slots();
  new (&t->floats) std::vector<double>();
  new (&t->integers) std::vector<int64_t>();
  new (&t->seeds) std::vector<uint64_t>();
  new (&t->results) std::vector<PendingObject*>();
  PyObject_GC_Track(t);
  return t;
}

int trace_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_trace(self)->programs);
  Py_VISIT(as_trace(self)->arrays);
  Py_VISIT(as_trace(self)->head);
  return 0;
}

int trace_clear(PyObject* self) {
  Py_CLEAR(as_trace(self)->programs);
  Py_CLEAR(as_trace(self)->arrays);
  Py_CLEAR(as_trace(self)->head);
  return 0;
}

void trace_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  trace_clear(self);
  auto* t = as_trace(self);
  std::destroy_at(&t->signature);
  std::destroy_at(&t->slots);
  std::destroy_at(&t->floats);
  std::destroy_at(&t->integers);
  std::destroy_at(&t->seeds);
  std::destroy_at(&t->results);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename T>
PyObject* as_bytes(const std::vector<T>& v) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(v.data()), static_cast<Py_ssize_t>(v.size() * sizeof(T)));
}

// close() -> (pending results that something refers to, their numbers, positions of the arrays that nothing else refers to)
PyObject* trace_close(PyObject* self, PyObject*) {
  auto* t = as_trace(self);
  PyObject* live = PyList_New(0);
  if (live == nullptr) return nullptr;
  t->sealed = true;
  Py_CLEAR(t->head);
  std::vector<int32_t> wanted, free;
  for (size_t i = 0; i < t->results.size(); ++i) {
    auto* p = reinterpret_cast<PyObject*>(t->results[i]);
    if (p == nullptr) continue;
    PyList_Append(live, p);
    wanted.push_back(static_cast<int32_t>(i));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(t->arrays); ++i)
    if (Py_REFCNT(PyList_GET_ITEM(t->arrays, i)) == 1) free.push_back(static_cast<int32_t>(i));
  return Py_BuildValue("(NNN)", live, as_bytes(wanted), as_bytes(free));
}

PyObject* trace_reopen(PyObject* self, PyObject*) {
  as_trace(self)->sealed = false;
  Py_RETURN_NONE;
}

// key() -> what was recorded, as bytes
PyObject* trace_key(PyObject* self, PyObject*) {
  auto* t = as_trace(self);
  PyObject* key = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>((t->signature.size() + 1) * sizeof(int32_t)));
  if (key == nullptr) return nullptr;
  auto* data = PyBytes_AS_STRING(key);
  std::memcpy(data, &t->device, sizeof(int32_t));
  std::memcpy(data + sizeof(int32_t), t->signature.data(), t->signature.size() * sizeof(int32_t));
  return key;
}

// numbers() -> the operands that are no arrays: bytes of float64, int64 and uint64 (seed and offset in turn)
PyObject* trace_numbers(PyObject* self, PyObject*) {
  auto* t = as_trace(self);
  return Py_BuildValue("(NNN)", as_bytes(t->floats), as_bytes(t->integers), as_bytes(t->seeds));
}

PyObject* trace_signature(PyObject* self, void*) {
  const auto& signature = as_trace(self)->signature;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(signature.size()));
  for (size_t i = 0; list != nullptr && i < signature.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), PyLong_FromLong(signature[i]));
  return list;
}

PyMemberDef g_trace_members[] = {
    {"programs", T_OBJECT, offsetof(TraceObject, programs), READONLY, "What was recorded, in order."},
    {"arrays", T_OBJECT, offsetof(TraceObject, arrays), READONLY, "The values from outside."},
    {"device", T_INT, offsetof(TraceObject, device), READONLY, "Index of the device."},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef g_trace_getters[] = {
    {"signature", trace_signature, nullptr,
     "Which program, on which earlier results (>= 0) and which arrays (-1 for the first).", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyMethodDef g_trace_methods[] = {
    {"close", trace_close, METH_NOARGS,
     "Let nothing be appended: (pending results that something refers to, their numbers as bytes of int32, positions of the "
     "arrays that nothing else refers to as bytes of int32)."},
    {"reopen", trace_reopen, METH_NOARGS, "Take close() back."},
    {"key", trace_key, METH_NOARGS, "The device and the signature, as bytes."},
    {"numbers", trace_numbers, METH_NOARGS,
     "The operands that are no arrays, as bytes: float64, int64, and seeds with their offsets as uint64."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot g_trace_slots[] = {
    {Py_tp_doc, const_cast<char*>("The operators recorded on one device and not run yet.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(trace_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(trace_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(trace_clear)},
    {Py_tp_members, g_trace_members},
    {Py_tp_getset, g_trace_getters},
    {Py_tp_methods, g_trace_methods},
    {0, nullptr},
};
PyType_Spec g_trace_spec = {
    "torchtpu._C.Trace", sizeof(TraceObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, g_trace_slots};

// Whether a trace must end before a program: a loop's next iteration begins, or it is long enough.
bool ends_before(const TraceObject* t, const PyObject* program, PyObject* operands) {
  const auto length = PyList_GET_SIZE(t->programs);
  if (length < kLoop) return false;
  if (program != PyList_GET_ITEM(t->programs, 0)) return length >= kLongest;
  const PyObject* first = PyList_GET_SIZE(operands) > 0 ? PyList_GET_ITEM(operands, 0) : nullptr;
  return length >= kLong || (first != nullptr && first == t->head);
}

void new_pending(int32_t count, std::vector<PyObject*>& made) {
  for (int32_t i = 0; i < count; ++i) {
    auto* p = PyObject_GC_New(PendingObject, g_pending_type);
    if (p == nullptr) throw py::error_already_set();
    p->array = p->error = nullptr;
    p->trace = nullptr;
    p->index = 0;
    PyObject_GC_Track(p);
    made.push_back(reinterpret_cast<PyObject*>(p));
  }
}

// Raise the error of a value that could not be computed.
[[noreturn]] void raise_error(PyObject* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  throw py::error_already_set();
}

}  // namespace

bool is_pending(PyObject* x) { return Py_TYPE(x) == g_pending_type; }

const Recorded* recorded_of(PyObject* capsule) {
  const auto* recorded = static_cast<const Recorded*>(PyCapsule_GetPointer(capsule, "torchtpu.Recorded"));
  if (recorded == nullptr) throw py::error_already_set();
  return recorded;
}

bool record(
    c10::DeviceIndex device, PyObject* program, const Recorded& recorded, PyObject* operands, const std::vector<int64_t>& starts,
    const std::pair<uint64_t, uint64_t>* seed, std::vector<PyObject*>& made) {
  auto*& current = g_traces.at(static_cast<size_t>(device));
  if (g_initialising && recorded.reads) return false;
  if (current != nullptr && (current->sealed || ends_before(current, program, operands))) return false;
  // Numbers first, then all objects: making objects may run other code, so nothing has been appended until both are there.
  std::vector<double> floats;
  std::vector<int64_t> integers;
  const auto count = std::min<size_t>(recorded.kinds.size(), static_cast<size_t>(PyList_GET_SIZE(operands)));
  for (size_t i = 0; i < count; ++i) {
    PyObject* x = PyList_GET_ITEM(operands, static_cast<Py_ssize_t>(i));
    if (recorded.kinds[i] == kFloat) {
      floats.push_back(PyFloat_AsDouble(x));
      if (floats.back() == -1 && PyErr_Occurred()) throw py::error_already_set();
    } else if (recorded.kinds[i] == kInteger) {
      integers.push_back(PyLong_AsLongLong(x));
      if (integers.back() == -1 && PyErr_Occurred()) throw py::error_already_set();
    } else if (recorded.kinds[i] != kAbsent && is_pending(x)) {
      auto* p = reinterpret_cast<PendingObject*>(x);
      if (p->error != nullptr) raise_error(p->error);
      if (p->array == nullptr && p->trace != current) return false;
    }
  }
  new_pending(recorded.results, made);
  if (current == nullptr) {
    auto* begun = new_trace(device);
    if (current != nullptr) {
      Py_DECREF(begun);
    } else {
      current = begun;
    }
  }
  auto* t = current;
  if (t->sealed) {
    for (auto* p : made) Py_DECREF(p);
    made.clear();
    return false;
  }
  const bool first = PyList_GET_SIZE(t->programs) == 0;
  if (first && PyList_GET_SIZE(operands) > 0 && !is_pending(PyList_GET_ITEM(operands, 0)))
    t->head = Py_NewRef(PyList_GET_ITEM(operands, 0));
  PyList_Append(t->programs, program);
  t->signature.push_back(recorded.uid);
  for (size_t i = 0; i < count; ++i) {
    if (recorded.kinds[i] != kArray && recorded.kinds[i] != kComplex) continue;
    PyObject* x = PyList_GET_ITEM(operands, static_cast<Py_ssize_t>(i));
    if (is_pending(x)) {
      auto* p = reinterpret_cast<PendingObject*>(x);
      if (p->trace == t) {
        t->signature.push_back(p->index);
        continue;
      }
      x = p->array;
    }
    const auto next = static_cast<int32_t>(PyList_GET_SIZE(t->arrays));
    const auto slot = t->slots.find(x, next);
    if (slot == next) PyList_Append(t->arrays, x);
    t->signature.push_back(-1 - slot);
  }
  t->floats.insert(t->floats.end(), floats.begin(), floats.end());
  t->integers.insert(t->integers.end(), integers.begin(), integers.end());
  t->integers.insert(t->integers.end(), starts.begin(), starts.end());
  if (seed != nullptr) t->seeds.insert(t->seeds.end(), {seed->first, seed->second});
  for (auto* x : made) {
    auto* p = reinterpret_cast<PendingObject*>(x);
    p->trace = reinterpret_cast<TraceObject*>(Py_NewRef(reinterpret_cast<PyObject*>(t)));
    p->index = static_cast<int32_t>(t->results.size());
    t->results.push_back(p);
  }
  return true;
}

namespace {

TraceObject*& trace_of(int64_t device) { return g_traces.at(static_cast<size_t>(device)); }

// settle(live, values, positions): give pending values their arrays; positions say which of the values, None: in order
void settle(const py::list& live, const py::list& values, const py::object& positions) {
  std::vector<size_t> places;
  if (!positions.is_none()) places = positions.cast<std::vector<size_t>>();
  size_t i = 0;
  for (const auto& item : live) {
    auto* p = reinterpret_cast<PendingObject*>(item.ptr());
    const auto at = places.empty() ? i : places.at(i);
    p->array = Py_NewRef(py::object(values[at]).ptr());
    detach(p);
    ++i;
  }
}

}  // namespace

void bind_record(py::module_& module) {
  g_pending_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&g_pending_spec));
  g_trace_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&g_trace_spec));
  if (g_pending_type == nullptr || g_trace_type == nullptr) throw py::error_already_set();
  module.attr("Pending") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(g_pending_type));
  module.attr("Trace") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(g_trace_type));
  module.def("make_recorded", [](int32_t uid, const std::vector<int>& kinds, int32_t results, bool reads) {
    auto* recorded = new Recorded{uid, {}, results, reads};
    for (const auto k : kinds) recorded->kinds.push_back(static_cast<Kind>(k));
    return py::capsule(recorded, "torchtpu.Recorded", [](PyObject* c) {
      delete static_cast<Recorded*>(PyCapsule_GetPointer(c, "torchtpu.Recorded"));
    });
  }, py::arg("uid"), py::arg("kinds"), py::arg("results"), py::arg("reads"), "What a trace needs to know of a program, for record().");
  module.def("record", [](const py::object& program, const py::object& recorded, const py::list& operands,
                          const std::vector<int64_t>& starts, const std::optional<std::pair<uint64_t, uint64_t>>& seed,
                          int64_t device) -> py::object {
    std::vector<PyObject*> made;
    if (!record(static_cast<c10::DeviceIndex>(device), program.ptr(), *recorded_of(recorded.ptr()), operands.ptr(), starts,
                seed.has_value() ? &*seed : nullptr, made))
      return py::none();
    py::list results(made.size());
    for (size_t i = 0; i < made.size(); ++i) PyList_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made[i]);
    return results;
  }, "Append an operator to the trace of a device: its results, pending, or None if the trace must end first.");
  module.def("trace_of", [](int64_t device) {
    auto* t = trace_of(device);
    return t == nullptr ? py::none() : py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(t));
  }, "The trace of a device, or None.");
  module.def("end_trace", [](int64_t device) {
    auto* t = std::exchange(trace_of(device), nullptr);
    Py_XDECREF(reinterpret_cast<PyObject*>(t));
  }, "Forget the trace of a device: the next operator begins another.");
  module.def("traced_devices", [] {
    std::vector<size_t> found;
    for (size_t i = 0; i < g_traces.size(); ++i)
      if (g_traces[i] != nullptr) found.push_back(i);
    return found;
  }, "The devices that have a trace.");
  module.def("settle", &settle, py::arg("live"), py::arg("values"), py::arg("positions") = py::none(),
             "Give pending values their arrays; positions say which of the values are theirs.");
  module.def("fail", [](const py::list& live, const py::object& error) {
    for (const auto& item : live) {
      auto* p = reinterpret_cast<PendingObject*>(item.ptr());
      Py_XSETREF(p->error, Py_NewRef(error.ptr()));
      detach(p);
    }
  }, "Say why pending values could not be computed.");
  module.def("set_initialising", [](bool on) { g_initialising = on; },
             "Whether an optimizer is making its state: what reads an array ends the trace then.");
}

}  // namespace torchtpu
