// What the hot path of eager dispatch consists of: a call's arguments as a key, results as tensors, and recording between them.
#pragma once

#include "storage.h"

#include <string>
#include <vector>

namespace torchtpu {

// Per overload: the argument names, and whether a Python number given for each is an operand of the program or part of its key.
struct Signature {
  std::vector<PyObject*> names;  // interned, owned for ever
  std::vector<bool> operand;
};
const Signature& signature_of(PyObject* handle);

// A call's arguments: what two calls must share to run the same program, and the values they differ in.
class Flattener {
 public:
  std::string key;
  PyObject* operands = PyList_New(0);
  PyObject* owners = PyList_New(0);
  int device = -1;

  Flattener();
  Flattener(const Flattener&) = delete;
  Flattener& operator=(const Flattener&) = delete;
  ~Flattener() {
    Py_XDECREF(operands);
    Py_XDECREF(owners);
  }

  // All arguments of a call (kwargs may be nullptr), the device, and the settings of the process that change what it means.
  void call(const Signature& signature, PyObject* args, PyObject* kwargs);

 private:
  uint64_t serial_;           // of this call: cells that bear it have been seen
  std::vector<Cell*> cells_;  // those, in order

  void leaf(PyObject* x, bool operand);
  void number(char kind, PyObject* x);
  int32_t slot(Cell* cell, PyObject* owner);
  void tensor(PyObject* object, const at::Tensor& t);
  void put(char c) { key.push_back(c); }
  template <typename T>
  void pod(T value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
};

// What a result looks like: the tensor's geometry and how its value is folded.
struct Spec {
  std::vector<int64_t> sizes, strides, shape;
  c10::ScalarType dtype;
  size_t nbytes;
  PyObject* op;  // the operator's name, or None
};
const Spec* spec_of(PyObject* capsule);

// A new tensor around a value.
at::Tensor make_tensor(const Spec& spec, PyObject* value, c10::DeviceIndex device);

// Give a storage a new value (None: uninitialised).
void set_cell(Cell* cell, PyObject* value, std::vector<int64_t> shape, c10::ScalarType dtype);

// The value of a cell (borrowed; nullptr: uninitialised). A pending value that has been computed meanwhile is replaced by its array.
PyObject* value_of(Cell* cell);

// ---- recording (record.cpp) ----

struct TraceObject;

// A value that a trace will compute.
struct PendingObject {
  PyObject_HEAD
  PyObject* array;     // the value once computed, else nullptr
  PyObject* error;     // why it could not be computed
  TraceObject* trace;  // nullptr once computed
  int32_t index;       // its number among the trace's results
};
bool is_pending(PyObject* x);

// How an operand reaches a recorded program; the numbers are those of torchtpu.eager.program.Kind.
enum Kind : char { kArray, kAbsent, kFloat, kInteger, kComplex };

// What a trace needs to know of a program.
struct Recorded {
  int32_t uid;
  std::vector<Kind> kinds;
  int32_t results;
  bool reads;  // whether its results depend on any array it is given
};
const Recorded* recorded_of(PyObject* capsule);

// Append an operator to the trace of a device, which begins if there is none, and give its results, pending (new references).
// False if the trace must end first, which Python sees to: nothing has been recorded then.
bool record(
    c10::DeviceIndex device, PyObject* program, const Recorded& recorded, PyObject* operands, const std::vector<int64_t>& starts,
    const std::pair<uint64_t, uint64_t>* seed, std::vector<PyObject*>& made);

}  // namespace torchtpu
