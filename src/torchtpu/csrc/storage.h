// What stands behind the data pointer of every tpu storage.
//
// A tpu storage has a unique address that is never dereferenced; the context of its DataPtr is a Cell, and the Cell holds the
// storage's value: a Python object (a jax.Array, or the output of a program that has not run yet). Every view of the storage
// sees the same Cell, so aliasing needs no registry.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <vector>

namespace torchtpu {

constexpr auto kTPU = c10::DeviceType::PrivateUse1;

struct Cell {
  PyObject* value = nullptr;   // owned; nullptr while uninitialised
  std::vector<int64_t> shape;  // shape of the value: the storage's elements, row-major, folded into these dimensions
  c10::ScalarType dtype = c10::ScalarType::Byte;  // element type of the value
  size_t nbytes = 0;           // bytes accounted to the device
  c10::DeviceIndex device = 0;
  uintptr_t address = 0;       // where PyTorch believes the storage to be
  uint64_t seen_by = 0;        // the latest call that had a tensor of this storage among its arguments,
  int32_t position = 0;        // and the storage's position among those of that call
  PyObject* op = nullptr;      // of large storages, owned: the operator that made it,
  PyObject* file = nullptr;    // and the user's line that called it
  int line = 0;
};

// Storages of at least this many bytes remember where they were made.
constexpr size_t kLarge = size_t{1} << 20;

// The Cell of a storage. Raises if the storage is not a tpu storage (or has been released).
Cell* cell_of(const c10::StorageImpl* storage);

// Allocator for tpu storages on the current device; its DataPtrs own a Cell.
c10::Allocator* allocator();

// A DataPtr with a fresh Cell of `nbytes` bytes on `device`.
c10::DataPtr allocate_on(size_t nbytes, c10::DeviceIndex device);

// Remember the Python line that asks for a storage.
void note_origin(Cell* cell);

// Call a function with every Cell there is; none is released meanwhile.
void for_each_cell(const std::function<void(const Cell*)>& function);

// Bytes that the storages of a device hold now.
size_t allocated_bytes(c10::DeviceIndex device);

// Account for a storage whose size changed (storage.resize_).
void resize_cell(Cell* cell, size_t nbytes);

// Reserve `count` draws of a generator (nullopt: the device's default) and return {seed, offset before the draws}.
std::pair<uint64_t, uint64_t> reserve_draws(
    const std::optional<at::Generator>& generator, c10::DeviceIndex device, uint64_t count);

// Registers the bindings of dispatch.cpp / device.cpp on the extension module.
void bind_dispatch(pybind11::module_& module);
void bind_kernel(pybind11::module_& module);
void bind_record(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_origin(pybind11::module_& module);
void bind_process_group(pybind11::module_& module);

}  // namespace torchtpu
