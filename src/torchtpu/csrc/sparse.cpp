// Sparse tensors: a sparse tensor is a few dense ones (indices, values), so most of what PyTorch does with one is written
// with operators on those, whatever their device. Such functions of PyTorch are registered here as they are; those that read
// memory are written in torchtpu/eager/sparse.py.
#include "storage.h"

#include <ATen/NativeFunctions.h>
#include <torch/library.h>

namespace torchtpu {
namespace {

namespace native = at::native;
using at::Tensor;
template <typename T>
using Maybe = std::optional<T>;

// PyTorch's functions make parts of a sparse tensor on the current device: that of the call has to be it.
Maybe<at::Device> place_of(const Tensor& t) { return t.defined() ? Maybe<at::Device>(t.device()) : std::nullopt; }
Maybe<at::Device> place_of(const at::ITensorListRef& list) { return at::device_of(list); }
Maybe<at::Device> place_of(const Maybe<at::Device>& device) {
  return device.has_value() && device->has_index() ? device : std::nullopt;
}
template <typename T>
Maybe<at::Device> place_of(const T&) { return std::nullopt; }

template <auto kernel, typename = decltype(kernel)>
struct OnDevice;
template <auto kernel, typename Result, typename... Arguments>
struct OnDevice<kernel, Result (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    Maybe<at::Device> device;
    ((device = device.has_value() ? device : place_of(arguments)), ...);
    const c10::OptionalDeviceGuard guard(device);
    return kernel(std::forward<Arguments>(arguments)...);
  }
};
#define IMPL(NAME, ...) m.impl(NAME, OnDevice<__VA_ARGS__>::call)

// f(x) with f(0) = 0, applied to the values: functional, in-place and out= forms.
#define COO_OUT(name)                   \
  IMPL(#name, native::name##_sparse); \
  IMPL(#name ".out", native::name##_sparse_out)
#define COO(name) \
  COO_OUT(name);  \
  IMPL(#name "_", native::name##_sparse_)
#define CSR_OUT(name)                       \
  IMPL(#name, native::name##_sparse_csr); \
  IMPL(#name ".out", native::name##_sparse_csr_out)
#define CSR(name) \
  CSR_OUT(name);  \
  IMPL(#name "_", native::name##_sparse_csr_)
#define EACH(MACRO)                                                                                        \
  MACRO(abs); MACRO(asin); MACRO(asinh); MACRO(atan); MACRO(atanh); MACRO(ceil); MACRO(deg2rad);           \
  MACRO(erf); MACRO(erfinv); MACRO(expm1); MACRO(floor); MACRO(frac); MACRO(log1p); MACRO(rad2deg);        \
  MACRO(round); MACRO(sgn); MACRO(sign); MACRO(sin); MACRO(sinh); MACRO(sqrt); MACRO(tan); MACRO(tanh);    \
  MACRO(trunc)
#define EACH_OUT(MACRO) MACRO(isneginf); MACRO(isposinf); MACRO(signbit)

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  // geometry and parts
  IMPL("sparse_dim", native::sparse_dim_sparse);
  IMPL("_dimI", native::sparse_dim_sparse);
  IMPL("dense_dim", native::dense_dim_sparse);
  IMPL("_dimV", native::dense_dim_sparse);
  IMPL("_nnz", native::_nnz_sparse);
  IMPL("is_coalesced", native::is_coalesced_sparse);
  IMPL("_coalesced_", native::_coalesced_sparse_);
  IMPL("_indices", native::_indices_sparse);
  IMPL("_values", native::_values_sparse);
  IMPL("indices", native::indices_sparse);
  IMPL("values", native::values_sparse);
  IMPL("sparse_resize_", native::sparse_resize_);
  IMPL("sparse_resize_and_clear_", native::sparse_resize_and_clear_);
  IMPL("resize_as_sparse_", native::resize_as_sparse_);
  IMPL("permute", native::permute_sparse_coo);
  IMPL("unsqueeze", native::unsqueeze_sparse);
  IMPL("narrow_copy", native::narrow_copy_sparse);
  IMPL("_sparse_broadcast_to", native::sparse_broadcast_to);
  IMPL("cat", native::cat_sparse);
  IMPL("view_as_real", native::view_as_real_sparse);
  IMPL("view_as_complex", native::view_as_complex_sparse);
  // creation and copies
  IMPL("empty.memory_format", native::empty_sparse_symint);
  IMPL("empty_like", native::empty_like_sparse_coo);
  IMPL("_sparse_coo_tensor_with_dims", native::new_with_dims_sparse);
  IMPL("_sparse_coo_tensor_with_dims_and_tensors", native::new_with_dims_and_tensor_sparse_symint);
  IMPL("clone", native::clone_sparse);
  IMPL("copy_", native::copy_sparse_wrapper_);
  IMPL("copy_sparse_to_sparse_", native::copy_sparse_);
  IMPL("zero_", native::zero_sparse_);
  IMPL("zeros.out", native::zeros_sparse_out);
  IMPL("_to_dense", native::sparse_to_dense);
  IMPL("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::sparse_coo_to_sparse));
  IMPL("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::sparse_coo_to_sparse));
  IMPL("_to_sparse_csr", native::coo_to_sparse_csr);
  IMPL("_to_sparse_csc", native::coo_to_sparse_csc);
  IMPL("_to_sparse_bsr", native::coo_to_sparse_bsr);
  IMPL("_to_sparse_bsc", native::coo_to_sparse_bsc);
  // arithmetic on the values
  EACH(COO);
  EACH_OUT(COO_OUT);
  COO(nan_to_num);
  IMPL("neg", native::neg_sparse);
  IMPL("neg_", native::neg_sparse_);
  IMPL("neg.out", native::neg_out_sparse);
  IMPL("relu", native::relu_sparse);
  IMPL("relu_", native::relu_sparse_);
  IMPL("isnan", native::isnan_sparse);
  IMPL("isinf", native::isinf_sparse);
  IMPL("conj_physical.out", native::conj_physical_out_sparse);
  IMPL("threshold_backward", native::threshold_backward_sparse);
  IMPL("threshold_backward.grad_input", native::threshold_backward_sparse_out);
  IMPL("pow.Tensor_Scalar", native::pow_sparse_scalar);
  IMPL("pow.Tensor_Scalar_out", native::pow_out_sparse_scalar);
  IMPL("div.Tensor", static_cast<Tensor (*)(const Tensor&, const Tensor&)>(native::div_sparse));
  IMPL("div_.Tensor", static_cast<Tensor& (*)(Tensor&, const Tensor&)>(native::div_sparse_));
  IMPL("div.out", static_cast<Tensor& (*)(const Tensor&, const Tensor&, Tensor&)>(native::div_out_sparse_zerodim));
  IMPL("div.Tensor_mode", static_cast<Tensor (*)(const Tensor&, const Tensor&, Maybe<c10::string_view>)>(native::div_sparse));
  IMPL("div_.Tensor_mode", static_cast<Tensor& (*)(Tensor&, const Tensor&, Maybe<c10::string_view>)>(native::div_sparse_));
  IMPL("div.out_mode", static_cast<Tensor& (*)(const Tensor&, const Tensor&, Maybe<c10::string_view>, Tensor&)>(native::div_out_sparse_zerodim));
  IMPL("floor_divide", native::floor_divide_sparse);
  IMPL("floor_divide_.Tensor", native::floor_divide_sparse_);
  IMPL("floor_divide.out", native::floor_divide_out_sparse_zerodim);
  // these lead to add.out, mul.out and addmm, whose kernels are in Python
  IMPL("add.Tensor", native::add_sparse);
  IMPL("add_.Tensor", native::add_sparse_);
  IMPL("sub.Tensor", native::sub_sparse);
  IMPL("sub_.Tensor", native::sub_sparse_);
  IMPL("sub.out", native::sub_out_sparse);
  IMPL("mul.Tensor", native::mul_sparse);
  IMPL("mul_.Tensor", native::mul_sparse_);
  IMPL("mm", static_cast<Tensor (*)(const Tensor&, const Tensor&)>(native::_sparse_mm));
  IMPL("mm.out", native::_sparse_mm_out);
  IMPL("mv", native::mv_sparse);
  // reductions
  IMPL("any", native::any_sparse);
  IMPL("sum", native::sum_coo);
  IMPL("sum.dim_IntList", native::sum_sparse_coo);
  IMPL("norm.ScalarOpt_dim", native::sparse_norm);
  IMPL("norm.ScalarOpt_dim_dtype", native::sparse_dtype_norm);
  IMPL("native_norm", static_cast<Tensor (*)(const Tensor&, const at::Scalar&)>(native::norm_sparse));
  IMPL("native_norm.ScalarOpt_dim_dtype", static_cast<Tensor (*)(const Tensor&, const Maybe<at::Scalar>&, at::IntArrayRef, bool, Maybe<at::ScalarType>)>(native::norm_sparse));
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  IMPL("sparse_dim", native::sparse_dim_sparse_csr);
  IMPL("dense_dim", native::dense_dim_sparse_csr);
  IMPL("_nnz", native::_nnz_sparse_csr);
  IMPL("values", native::values_sparse_csr);
  IMPL("crow_indices", native::crow_indices_sparse_csr);
  IMPL("col_indices", native::col_indices_sparse_csr);
  IMPL("ccol_indices", native::ccol_indices_sparse_csr);
  IMPL("row_indices", native::row_indices_sparse_csr);
  IMPL("select.int", native::select_sparse_csr);
  IMPL("select_copy.int", native::select_copy_sparse_csr);
  IMPL("resize_", native::resize_sparse_csr_);
  IMPL("resize_as_sparse_", native::resize_as_sparse_compressed_);
  IMPL("empty.memory_format", native::empty_sparse_compressed);
  IMPL("empty_like", native::empty_like_sparse_csr);
  IMPL("clone", native::clone_sparse_compressed);
  IMPL("copy_", native::copy_sparse_compressed_);
  IMPL("fill_.Scalar", native::fill_sparse_csr_);
  IMPL("zero_", native::zero_sparse_csr_);
  IMPL("normal_", native::normal_sparse_csr_);
  IMPL("_to_dense", native::sparse_compressed_to_dense);
  IMPL("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::sparse_compressed_to_sparse));
  IMPL("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::sparse_compressed_to_sparse));
  IMPL("sparse_mask", native::sparse_mask_sparse_compressed);
  EACH(CSR);
  EACH_OUT(CSR_OUT);
  CSR_OUT(angle);
  CSR(neg);
  IMPL("relu", native::relu_sparse_csr);
  IMPL("relu_", native::relu_sparse_csr_);
  IMPL("isnan", native::isnan_sparse_csr);
  IMPL("isinf", native::isinf_sparse_csr);
  IMPL("_conj_physical", native::conj_physical_sparse_csr);
  IMPL("conj_physical_", native::conj_physical_sparse_csr_);
  IMPL("conj_physical.out", native::conj_physical_sparse_csr_out);
  IMPL("threshold_backward", native::threshold_backward_sparse_compressed);
  IMPL("threshold_backward.grad_input", native::threshold_backward_sparse_compressed_out);
  IMPL("add.Tensor", native::add_sparse_csr);
  IMPL("add_.Tensor", native::add_sparse_csr_);
  IMPL("mul.Tensor", native::mul_sparse_csr);
  IMPL("mul_.Tensor", native::mul_sparse_csr_);
  IMPL("mul.out", native::mul_out_sparse_csr);
  IMPL("mul.Scalar", native::mul_scalar_sparse_csr);
  IMPL("mul_.Scalar", native::mul__scalar_sparse_csr);
  IMPL("addmm", native::addmm_sparse_compressed_dense);
  IMPL("mm", native::_sparse_csr_mm);
  IMPL("mm.out", native::_sparse_csr_mm_out);
  IMPL("sum", native::sum_csr);
  IMPL("sum.dim_IntList", native::sum_sparse_compressed);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  IMPL("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::dense_to_sparse));
  IMPL("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::dense_to_sparse));
  IMPL("_to_sparse_csr", native::dense_to_sparse_csr);
  IMPL("_to_sparse_csc", native::dense_to_sparse_csc);
  IMPL("_to_sparse_bsr", native::dense_to_sparse_bsr);
  IMPL("_to_sparse_bsc", native::dense_to_sparse_bsc);
}

}  // namespace
}  // namespace torchtpu
