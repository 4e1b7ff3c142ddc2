// The extension module: what Python sees of csrc.
#include "storage.h"

#include <ATen/autocast_mode.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The part of torchtpu that PyTorch only lets C++ do: allocator, guard, hooks, generator, views, dispatch.";
  // bfloat16 is what the hardware computes in; PyTorch's default for a new backend is float16. The setting is per thread, and
  // this is the thread that imports the package.
  at::autocast::set_autocast_dtype(torchtpu::kTPU, at::kBFloat16);
  torchtpu::bind_device(module);
  torchtpu::bind_dispatch(module);
  torchtpu::bind_kernel(module);
  torchtpu::bind_origin(module);
  torchtpu::bind_process_group(module);
  torchtpu::bind_record(module);
}
