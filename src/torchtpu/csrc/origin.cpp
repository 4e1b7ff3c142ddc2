// What Python asks of the accounting: bytes held now, and where large storages were made, for out-of-memory errors.
#include "callbacks.h"
#include "storage.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <frameobject.h>

#include <string>
#include <string_view>

namespace py = pybind11;

namespace torchtpu {
namespace {

// Folders whose frames are not the user's: torch and torchtpu.
std::vector<std::string> g_library_folders;

bool in_library(PyObject* file) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(file, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return true;
  }
  const std::string_view name(text, static_cast<size_t>(size));
  for (const auto& folder : g_library_folders)
    if (name.substr(0, folder.size()) == folder) return true;
  return false;
}

}  // namespace

// The innermost Python frame outside torch and torchtpu. A backward pass has none on its thread.
void note_origin(Cell* cell) {
  if (!interpreter_usable()) return;
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* f = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(f)));
    const py::object file = code.attr("co_filename");
    if (!in_library(file.ptr())) {
      cell->file = Py_NewRef(file.ptr());
      cell->line = PyFrame_GetLineNumber(f);
      return;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(f)));
  }
}

void bind_origin(py::module_& module) {
  module.def("set_library_folders", [](std::vector<std::string> folders) { g_library_folders = std::move(folders); },
             "Folders of Python files that are not the user's.");
  module.def("allocated_bytes", [](int64_t device) { return allocated_bytes(static_cast<c10::DeviceIndex>(device)); },
             "Bytes that the storages of a device hold now.");
  module.def("large_storages", [](int64_t device) {
    // Copied first: making Python objects may release storages, which waits for the table.
    std::vector<Cell> large;
    for_each_cell([&](const Cell* cell) {
      if (cell->device != device || cell->nbytes < kLarge) return;
      large.push_back(*cell);
      Py_XINCREF(cell->op);
      Py_XINCREF(cell->file);
    });
    py::list found;
    const auto owned = [](PyObject* x) { return x == nullptr ? py::none() : py::reinterpret_steal<py::object>(x); };
    for (const auto& cell : large)
      found.append(py::make_tuple(
          cell.nbytes, py::tuple(py::cast(cell.shape)),
          py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(cell.dtype))),
          cell.value != nullptr, owned(cell.op), owned(cell.file), cell.line));
    return found;
  }, "(bytes, shape, dtype, whether it has a value, operator, file, line) of every storage of 1 MiB or more on a device.");
}

}  // namespace torchtpu
