// The few questions C++ asks of the Python runtime, and the process state they depend on.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

namespace torchtpu {

// Python functions given to set_callbacks(). The GIL must be held to touch them.
struct Callbacks {
  pybind11::object initialise;         // () -> int: start the runtime, return the number of devices; -1 while it starts
  pybind11::object device_count;       // () -> int: without starting anything
  pybind11::object is_available;       // () -> bool
  pybind11::object synchronize;        // (device) -> None
  pybind11::object query;              // (device) -> bool: has everything enqueued finished?
  pybind11::object memory_info;        // (device) -> (free bytes, total bytes)
  pybind11::object record_event;       // (device, timing) -> event
  pybind11::object query_event;        // (event) -> bool
  pybind11::object synchronize_event;  // (event) -> None
  pybind11::object elapsed_time;       // (event, event) -> milliseconds
};

const Callbacks& callbacks();

// Start the Python runtime unless it runs already. Raises what Python raises: no device, or a forked child.
void ensure_initialised();
bool is_initialised();

// True when this process was forked from one whose runtime had started: nothing of it can be used here.
bool in_bad_fork();

// False while the interpreter shuts down and in a bad fork: then Python objects may only be leaked.
bool interpreter_usable();

// Number of devices; 0 if even that cannot be told. Never starts the runtime.
c10::DeviceIndex device_count() noexcept;

// The device current in this thread.
c10::DeviceIndex current_device() noexcept;

// Raise unless there is such a device.
void check_index(c10::DeviceIndex index);

// `index`, or the current device when it is negative; checked.
c10::DeviceIndex resolve_index(c10::DeviceIndex index);

// Default generator of a device, for the hooks.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Change the size of a storage and of what is accounted for it.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// Host memory that remembers that it is pinned.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// The device whose storages contain this address; -1 if none.
c10::DeviceIndex device_of_address(const void* pointer);

}  // namespace torchtpu
