// The hot path of eager dispatch: turn a call's arguments into a key and the values it reads, and wrap results as tensors.
// Nothing here knows an operator; what a key means is decided in Python (torchtpu/eager).
#include "dispatch.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <deque>

namespace py = pybind11;

namespace torchtpu {
namespace {

std::deque<Signature> g_signatures;  // a deque: kernels refer to them

int64_t integer(PyObject* x) {
  const auto value = PyLong_AsLongLong(x);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

}  // namespace

const Signature& signature_of(PyObject* handle) { return g_signatures.at(PyLong_AsSize_t(handle)); }

PyObject* value_of(Cell* cell) {
  if (cell->value != nullptr && is_pending(cell->value)) {
    PyObject* array = reinterpret_cast<PendingObject*>(cell->value)->array;
    if (array != nullptr) {
      PyObject* old = cell->value;
      cell->value = Py_NewRef(array);
      Py_DECREF(old);
    }
  }
  return cell->value;
}

Flattener::Flattener() {
  static uint64_t calls = 0;
  serial_ = ++calls;
  key.reserve(192);
}

void Flattener::leaf(PyObject* x, bool operand) {
  if (THPVariable_Check(x)) return tensor(x, THPVariable_Unpack(x));
  if (x == Py_None) return put('n');
  if (PyBool_Check(x)) return operand ? number('B', x) : (put(x == Py_True ? 't' : 'f'));
  if (PyLong_Check(x)) {
    if (operand) return number('I', x);
    put('i');
    return pod<int64_t>(integer(x));
  }
  if (PyFloat_Check(x)) {
    if (operand) return number('F', x);
    put('d');
    return pod<double>(PyFloat_AS_DOUBLE(x));
  }
  if (PyTuple_Check(x) || PyList_Check(x)) {
    const auto n = PySequence_Fast_GET_SIZE(x);
    put('[');
    pod<int64_t>(n);
    for (Py_ssize_t i = 0; i < n; ++i) leaf(PySequence_Fast_GET_ITEM(x, i), operand);
    return;
  }
  if (PyUnicode_Check(x)) {
    Py_ssize_t n = 0;
    const char* s = PyUnicode_AsUTF8AndSize(x, &n);
    if (s == nullptr) throw py::error_already_set();
    put('s');
    pod<int64_t>(n);
    key.append(s, n);
    return;
  }
  if (THPDtype_Check(x)) {
    put('D');
    return put(static_cast<char>(reinterpret_cast<THPDtype*>(x)->scalar_type));
  }
  if (THPDevice_Check(x)) {
    const auto d = reinterpret_cast<THPDevice*>(x)->device;
    if (d.type() == kTPU && device < 0 && d.has_index()) device = d.index();
    put('V');
    put(static_cast<char>(d.type()));
    return put(static_cast<char>(d.index()));
  }
  if (THPLayout_Check(x)) {
    put('L');
    return put(static_cast<char>(reinterpret_cast<THPLayout*>(x)->layout));
  }
  if (THPMemoryFormat_Check(x)) {
    put('M');
    return put(static_cast<char>(reinterpret_cast<THPMemoryFormat*>(x)->memory_format));
  }
  if (THPGenerator_Check(x)) return put('G');
  if (PyComplex_Check(x)) {
    if (operand) return number('C', x);
    put('c');
    pod<double>(PyComplex_RealAsDouble(x));
    return pod<double>(PyComplex_ImagAsDouble(x));
  }
  if (PyIndex_Check(x)) {  // SymInt and NumPy integers
    put('i');
    py::object i = py::reinterpret_steal<py::object>(PyNumber_Index(x));
    if (!i) throw py::error_already_set();
    // That was Python code, which may have called operators on the same storages.
    for (size_t n = 0; n < cells_.size(); ++n) {
      cells_[n]->seen_by = serial_;
      cells_[n]->position = static_cast<int32_t>(n);
    }
    return pod<int64_t>(integer(i.ptr()));
  }
  TORCH_CHECK_TYPE(false, "torchtpu cannot pass an argument of type ", Py_TYPE(x)->tp_name, " to an operator");
}

void Flattener::number(char kind, PyObject* x) {
  put(kind);
  PyList_Append(operands, x);
}

// The position of a cell among the storages this call touches; its value is an operand only once.
int32_t Flattener::slot(Cell* cell, PyObject* owner) {
  if (cell->seen_by == serial_) return cell->position;
  cell->seen_by = serial_;
  cell->position = static_cast<int32_t>(cells_.size());
  cells_.push_back(cell);
  PyObject* value = value_of(cell);
  PyList_Append(operands, value == nullptr ? Py_None : value);
  PyList_Append(owners, owner);
  put('S');
  if (cell->value == nullptr) {
    put('u');
  } else {
    put(static_cast<char>(cell->dtype));
    pod<int32_t>(static_cast<int32_t>(cell->shape.size()));
    key.append(reinterpret_cast<const char*>(cell->shape.data()), cell->shape.size() * sizeof(int64_t));
  }
  return cell->position;
}

void Flattener::tensor(PyObject* object, const at::Tensor& t) {
  if (!t.defined()) return put('n');
  if (t.device().type() == kTPU && t.layout() == c10::Layout::Strided) {
    const int index = t.device().index();
    if (device < 0) device = index;
    // The storage must be addressed before the tensor's own fields: its first mention writes into the key.
    const auto position = slot(cell_of(t.storage().unsafeGetStorageImpl()), object);
    put('T');
    pod<int32_t>(position);
    put(static_cast<char>(t.scalar_type()));
    put(static_cast<char>(index));
    put(static_cast<char>((t.is_conj() ? 1 : 0) | (t.is_neg() ? 2 : 0)));
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    pod<int32_t>(static_cast<int32_t>(sizes.size()));
    for (const auto s : sizes) pod<int64_t>(s);
    for (const auto s : strides) pod<int64_t>(s);
    return pod<int64_t>(t.storage_offset());
  }
  if (t.device().is_cpu() && t.dim() == 0 && t.layout() == c10::Layout::Strided) {
    put('W');
    put(t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 'c');
    put(static_cast<char>(t.scalar_type()));
    const at::Scalar s = t.item();
    PyObject* number = nullptr;
    if (s.isBoolean()) {
      number = PyBool_FromLong(s.toBool());
    } else if (s.isIntegral(false)) {
      number = PyLong_FromLongLong(s.toLong());
    } else if (s.isComplex()) {
      const auto c = s.toComplexDouble();
      number = PyComplex_FromDoubles(c.real(), c.imag());
    } else {
      number = PyFloat_FromDouble(s.toDouble());
    }
    PyList_Append(operands, number);
    Py_DECREF(number);
    return;
  }
  put('X');  // another device or layout: the caller raises, or computes elsewhere
  put(static_cast<char>(t.device().type()));
  put(static_cast<char>(t.dim() > 0));
}

void Flattener::call(const Signature& signature, PyObject* args, PyObject* kwargs) {
  const auto n = PyTuple_GET_SIZE(args);
  for (Py_ssize_t i = 0; i < n; ++i)
    leaf(PyTuple_GET_ITEM(args, i), i < static_cast<Py_ssize_t>(signature.operand.size()) && signature.operand[i]);
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t cursor = 0;
  while (kwargs != nullptr && PyDict_Next(kwargs, &cursor, &name, &value)) {
    size_t i = 0;
    while (i < signature.names.size() && signature.names[i] != name &&
           PyUnicode_Compare(signature.names[i], name) != 0)
      ++i;
    put('k');
    put(static_cast<char>(i));
    leaf(value, i < signature.operand.size() && signature.operand[i]);
  }
  if (device < 0) device = c10::impl::getDeviceGuardImpl(kTPU)->getDevice().index();
  put(static_cast<char>(device));
  // Settings of the process that change what an operator means.
  put(static_cast<char>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  put(static_cast<char>(at::globalContext().float32MatmulPrecision()));
}

const Spec* spec_of(PyObject* capsule) {
  const auto* spec = static_cast<const Spec*>(PyCapsule_GetPointer(capsule, "torchtpu.Spec"));
  if (spec == nullptr) throw py::error_already_set();
  return spec;
}

void set_cell(Cell* cell, PyObject* value, std::vector<int64_t> shape, c10::ScalarType dtype) {
  PyObject* old = cell->value;
  cell->value = value == Py_None ? nullptr : Py_NewRef(value);
  cell->shape = std::move(shape);
  cell->dtype = dtype;
  Py_XDECREF(old);  // last: it may run other code
}

at::Tensor make_tensor(const Spec& spec, PyObject* value, c10::DeviceIndex device) {
  auto data = allocate_on(spec.nbytes, device);
  auto* cell = static_cast<Cell*>(data.get_context());
  set_cell(cell, value, spec.shape, spec.dtype);
  if (spec.nbytes >= kLarge && spec.op != Py_None) cell->op = Py_NewRef(spec.op);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), spec.nbytes, std::move(data), allocator(), /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(spec.dtype));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides);
  return result;
}

namespace {

// flatten(handle, args, kwargs) -> (key, operands, owners, device)
PyObject* flatten(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argc == 3, "flatten takes (handle, args, kwargs)");
  Flattener f;
  f.call(signature_of(argv[0]), argv[1], argv[2]);
  return Py_BuildValue(
      "(NOOi)", PyBytes_FromStringAndSize(f.key.data(), static_cast<Py_ssize_t>(f.key.size())), f.operands, f.owners, f.device);
  END_HANDLE_TH_ERRORS
}

// wrap(spec, value, device) -> Tensor
PyObject* wrap(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argc == 3, "wrap takes (spec, value, device)");
  const auto* spec = spec_of(argv[0]);
  return THPVariable_Wrap(make_tensor(*spec, argv[1], static_cast<c10::DeviceIndex>(PyLong_AsLong(argv[2]))));
  END_HANDLE_TH_ERRORS
}

// store(tensor, value, spec): give the storage behind a tensor a new value; only the spec's shape and dtype are used.
PyObject* store(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argc == 3 && THPVariable_Check(argv[0]), "store takes (tensor, value, spec)");
  const auto* spec = spec_of(argv[2]);
  const auto& t = THPVariable_Unpack(argv[0]);
  set_cell(cell_of(t.storage().unsafeGetStorageImpl()), argv[1], spec->shape, spec->dtype);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// share(self, src) -> whether `self` was given the value of `src`, which needs no copy where both are whole storages of one
// layout: arrays are immutable.
PyObject* share(PyObject*, PyObject* const* argv, Py_ssize_t argc) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argc == 2 && THPVariable_Check(argv[0]) && THPVariable_Check(argv[1]), "share takes two tensors");
  const auto& self = THPVariable_Unpack(argv[0]);
  const auto& src = THPVariable_Unpack(argv[1]);
  const auto whole = [](const at::Tensor& t) {
    return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() &&
        static_cast<size_t>(t.numel()) * t.element_size() == t.storage().nbytes();
  };
  if (self.device() != src.device() || self.dtype() != src.dtype() || self.sizes() != src.sizes() ||
      self.strides() != src.strides() || self.is_conj() != src.is_conj() || self.is_neg() != src.is_neg() || !whole(self) ||
      !whole(src))
    Py_RETURN_FALSE;
  auto* from = cell_of(src.storage().unsafeGetStorageImpl());
  PyObject* value = value_of(from);
  if (value == nullptr) Py_RETURN_FALSE;
  set_cell(cell_of(self.storage().unsafeGetStorageImpl()), value, from->shape, from->dtype);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef g_fast_methods[] = {
    {"flatten", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(flatten)), METH_FASTCALL, nullptr},
    {"share", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(share)), METH_FASTCALL, nullptr},
    {"store", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(store)), METH_FASTCALL, nullptr},
    {"wrap", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wrap)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

py::capsule make_spec(
    std::vector<int64_t> sizes, std::vector<int64_t> strides, std::vector<int64_t> shape, const py::object& dtype,
    const py::object& op) {
  TORCH_CHECK(THPDtype_Check(dtype.ptr()), "make_spec: dtype must be a torch.dtype");
  const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  size_t elements = 1;
  for (const auto d : shape) elements *= static_cast<size_t>(d);
  auto* spec = new Spec{
      std::move(sizes), std::move(strides), std::move(shape), type, elements * c10::elementSize(type),
      Py_NewRef(op.ptr())};
  return py::capsule(spec, "torchtpu.Spec", [](PyObject* c) {
    auto* old = static_cast<Spec*>(PyCapsule_GetPointer(c, "torchtpu.Spec"));
    Py_DECREF(old->op);
    delete old;
  });
}

Cell* cell_of_tensor(const at::Tensor& t) {
  TORCH_CHECK(t.device().type() == kTPU, "expected a tpu tensor, got one on ", t.device());
  return cell_of(t.storage().unsafeGetStorageImpl());
}

}  // namespace

void bind_dispatch(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_fast_methods) != 0) throw py::error_already_set();
  module.def("register_signature", [](const std::vector<std::string>& names, const std::vector<bool>& operand) {
    Signature s;
    for (const auto& n : names) s.names.push_back(PyUnicode_InternFromString(n.c_str()));
    s.operand = operand;
    g_signatures.push_back(std::move(s));
    return g_signatures.size() - 1;
  }, "Describe an overload's arguments; returns the handle for flatten().");
  module.def("make_spec", &make_spec, py::arg("sizes"), py::arg("strides"), py::arg("shape"), py::arg("dtype"),
             py::arg("op") = py::none(), "What a result looks like, for wrap().");
  module.def("get_value", [](const at::Tensor& t) -> py::tuple {
    auto* cell = cell_of_tensor(t);
    auto* held = value_of(cell);
    py::object value = held == nullptr ? py::none() : py::reinterpret_borrow<py::object>(held);
    return py::make_tuple(
        value, py::tuple(py::cast(cell->shape)), py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(cell->dtype))));
  }, "(value or None, shape, dtype) of the storage behind a tensor.");
  module.def("set_value", [](const at::Tensor& t, const py::object& value, std::vector<int64_t> shape, const py::object& dtype) {
    TORCH_CHECK(THPDtype_Check(dtype.ptr()), "set_value: dtype must be a torch.dtype");
    set_cell(cell_of_tensor(t), value.ptr(), std::move(shape), reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  }, py::arg("tensor"), py::arg("value"), py::arg("shape"), py::arg("dtype"),
     "Give the storage behind a tensor a new value (None: uninitialised).");
  module.def("storage_of", [](const at::Tensor& t) {
    const auto* storage = t.storage().unsafeGetStorageImpl();
    return std::make_pair(reinterpret_cast<uintptr_t>(storage), storage->nbytes());
  }, "(identity, bytes) of a tensor's storage, without a Python object for it: that would count as one more owner, and "
     "autograd accumulates in place only where it finds one.");
  module.def("is_wrapped_number", [](const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number(); });
  module.def("reserve_draws", [](const std::optional<at::Generator>& generator, int64_t device, uint64_t count) {
    return reserve_draws(generator, static_cast<c10::DeviceIndex>(device), count);
  }, "Reserve draws of a generator: (seed, offset before them).");
}

}  // namespace torchtpu
