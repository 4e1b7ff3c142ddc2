// The kernel of an operator: its calls by signature. Those that are recorded and need nothing else never enter Python.
#include "dispatch.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <memory>
#include <unordered_map>

namespace py = pybind11;

namespace torchtpu {
namespace {

bool g_recording = false;  // whether the eager mode is "fused"

// How a call is recorded.
struct Recording {
  py::object program;
  const Recorded* recorded;
  std::vector<int64_t> starts;
  std::vector<const Spec*> fresh;                      // the new tensors
  std::vector<std::pair<Py_ssize_t, const Spec*>> writes;  // positions among the storages of those that get a new value
  std::vector<Py_ssize_t> returned;                    // for each result the argument that it is, or -1: the next new tensor
  py::object kept;                                     // what the pointers above point into
};

struct Entry {
  PyObject* call = nullptr;  // (args, kwargs, operands, owners, device), owned
  std::unique_ptr<Recording> recording;
};

struct KernelObject {
  PyObject_HEAD
  const Signature* signature;
  PyObject* miss;  // (args, kwargs): the first call of a signature
  std::unordered_map<std::string, Entry> entries;
};

// A result of an in-place or out= operator: the argument it wrote to. Borrowed.
PyObject* argument(const Signature& signature, Py_ssize_t position, PyObject* args, PyObject* kwargs) {
  if (position < PyTuple_GET_SIZE(args)) return PyTuple_GET_ITEM(args, position);
  PyObject* found = kwargs == nullptr ? nullptr : PyDict_GetItem(kwargs, signature.names.at(static_cast<size_t>(position)));
  TORCH_CHECK(found != nullptr, "an argument that is written to was not given");
  return found;
}

// Record a call and wrap its results; nullptr (without an error) if Python must end the trace first.
PyObject* record_call(const KernelObject* kernel, const Recording& how, const Flattener& f, PyObject* args, PyObject* kwargs) {
  std::vector<PyObject*> made;
  if (!record(static_cast<c10::DeviceIndex>(f.device), how.program.ptr(), *how.recorded, f.operands, how.starts, nullptr, made))
    return nullptr;
  const auto device = static_cast<c10::DeviceIndex>(f.device);
  std::vector<py::object> values;
  for (auto* x : made) values.push_back(py::reinterpret_steal<py::object>(x));
  for (size_t i = 0; i < how.writes.size(); ++i) {
    const auto& [place, spec] = how.writes[i];
    const auto& t = THPVariable_Unpack(PyList_GET_ITEM(f.owners, place));
    set_cell(cell_of(t.storage().unsafeGetStorageImpl()), values.at(how.fresh.size() + i).ptr(), spec->shape, spec->dtype);
  }
  if (how.returned.empty()) Py_RETURN_NONE;
  std::vector<py::object> results;
  size_t next = 0;
  for (const auto position : how.returned) {
    if (position >= 0) {
      results.push_back(py::reinterpret_borrow<py::object>(argument(*kernel->signature, position, args, kwargs)));
    } else {
      results.push_back(py::reinterpret_steal<py::object>(
          THPVariable_Wrap(make_tensor(*how.fresh.at(next), values.at(next).ptr(), device))));
      ++next;
    }
  }
  if (results.size() == 1) return results[0].release().ptr();
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  for (size_t i = 0; i < results.size(); ++i)
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), results[i].release().ptr());
  return tuple;
}

PyObject* kernel_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  auto* kernel = reinterpret_cast<KernelObject*>(self);
  Flattener f;
  f.call(*kernel->signature, args, kwargs);
  const auto found = kernel->entries.find(f.key);
  const auto named = kwargs == nullptr ? py::dict() : py::reinterpret_borrow<py::dict>(kwargs);
  if (found == kernel->entries.end()) return PyObject_CallFunctionObjArgs(kernel->miss, args, named.ptr(), nullptr);
  const auto& entry = found->second;
  if (g_recording && entry.recording != nullptr) {
    PyObject* result = record_call(kernel, *entry.recording, f, args, kwargs);
    if (result != nullptr) return result;
  }
  const auto device = py::int_(f.device);
  const auto call = py::reinterpret_borrow<py::object>(entry.call);
  return PyObject_CallFunctionObjArgs(call.ptr(), args, named.ptr(), f.operands, f.owners, device.ptr(), nullptr);
  END_HANDLE_TH_ERRORS
}

// add(key, call, recording): how calls of a signature are made from now on
PyObject* kernel_add(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *key = nullptr, *call = nullptr, *recording = nullptr;
  if (!PyArg_ParseTuple(arguments, "SOO", &key, &call, &recording)) return nullptr;
  Entry entry;
  entry.call = Py_NewRef(call);
  if (recording != Py_None) {
    const auto given = py::reinterpret_borrow<py::tuple>(recording);
    TORCH_CHECK(given.size() == 6, "a recording is (program, recorded, starts, fresh, writes, returned)");
    auto how = std::make_unique<Recording>();
    how->program = given[0];
    how->recorded = recorded_of(py::object(given[1]).ptr());
    how->starts = given[2].cast<std::vector<int64_t>>();
    for (const auto& spec : given[3].cast<py::list>()) how->fresh.push_back(spec_of(spec.ptr()));
    for (const auto& write : given[4].cast<py::list>()) {
      const auto pair = write.cast<py::tuple>();
      how->writes.emplace_back(pair[0].cast<Py_ssize_t>(), spec_of(py::object(pair[1]).ptr()));
    }
    how->returned = given[5].cast<std::vector<Py_ssize_t>>();
    how->kept = given;
    entry.recording = std::move(how);
  }
  auto& place = reinterpret_cast<KernelObject*>(self)->entries[std::string(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))];
  std::swap(place, entry);
  Py_XDECREF(entry.call);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* kernel_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *handle = nullptr, *miss = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &handle, &miss)) return nullptr;
  const auto& signature = signature_of(handle);
  auto* kernel = reinterpret_cast<KernelObject*>(type->tp_alloc(type, 0));
  if (kernel == nullptr) return nullptr;
  kernel->signature = &signature;
  kernel->miss = Py_NewRef(miss);
  new (&kernel->entries) std::unordered_map<std::string, Entry>();
  return reinterpret_cast<PyObject*>(kernel);
  END_HANDLE_TH_ERRORS
}

void kernel_dealloc(PyObject* self) {
  auto* kernel = reinterpret_cast<KernelObject*>(self);
  for (auto& [key, entry] : kernel->entries) Py_XDECREF(entry.call);
  std::destroy_at(&kernel->entries);
  Py_XDECREF(kernel->miss);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef g_kernel_methods[] = {
    {"add", kernel_add, METH_VARARGS,
     "add(key, call, recording): how calls of a signature are made. `call` takes (args, kwargs, operands, owners, device); "
     "`recording`, or None, is (program, recorded, starts, specs of new tensors, (position among the storages, spec) of those "
     "written, for each result the argument that it is or -1), and stands for `call` while operators are recorded."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot g_kernel_slots[] = {
    {Py_tp_doc, const_cast<char*>("Kernel(handle, miss): the calls of an overload, by signature; miss(args, kwargs) makes a new one.")},
    {Py_tp_new, reinterpret_cast<void*>(kernel_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(kernel_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(kernel_call)},
    {Py_tp_methods, g_kernel_methods},
    {0, nullptr},
};
PyType_Spec g_kernel_spec = {"torchtpu._C.Kernel", sizeof(KernelObject), 0, Py_TPFLAGS_DEFAULT, g_kernel_slots};

}  // namespace

void bind_kernel(py::module_& module) {
  PyObject* type = PyType_FromSpec(&g_kernel_spec);
  if (type == nullptr) throw py::error_already_set();
  module.attr("Kernel") = py::reinterpret_steal<py::object>(type);
  module.def("set_recording", [](bool on) { g_recording = on; }, "Whether operators are recorded: the eager mode \"fused\".");
}

}  // namespace torchtpu
