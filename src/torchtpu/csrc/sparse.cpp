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

// f(x) with f(0) = 0, applied to the values: functional, in-place and out= forms.
#define COO_OUT(name)                   \
  m.impl(#name, native::name##_sparse); \
  m.impl(#name ".out", native::name##_sparse_out)
#define COO(name) \
  COO_OUT(name);  \
  m.impl(#name "_", native::name##_sparse_)
#define CSR_OUT(name)                       \
  m.impl(#name, native::name##_sparse_csr); \
  m.impl(#name ".out", native::name##_sparse_csr_out)
#define CSR(name) \
  CSR_OUT(name);  \
  m.impl(#name "_", native::name##_sparse_csr_)
#define EACH(MACRO)                                                                                        \
  MACRO(abs); MACRO(asin); MACRO(asinh); MACRO(atan); MACRO(atanh); MACRO(ceil); MACRO(deg2rad);           \
  MACRO(erf); MACRO(erfinv); MACRO(expm1); MACRO(floor); MACRO(frac); MACRO(log1p); MACRO(rad2deg);        \
  MACRO(round); MACRO(sgn); MACRO(sign); MACRO(sin); MACRO(sinh); MACRO(sqrt); MACRO(tan); MACRO(tanh);    \
  MACRO(trunc)
#define EACH_OUT(MACRO) MACRO(isneginf); MACRO(isposinf); MACRO(signbit)

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  // geometry and parts
  m.impl("sparse_dim", native::sparse_dim_sparse);
  m.impl("_dimI", native::sparse_dim_sparse);
  m.impl("dense_dim", native::dense_dim_sparse);
  m.impl("_dimV", native::dense_dim_sparse);
  m.impl("_nnz", native::_nnz_sparse);
  m.impl("is_coalesced", native::is_coalesced_sparse);
  m.impl("_coalesced_", native::_coalesced_sparse_);
  m.impl("_indices", native::_indices_sparse);
  m.impl("_values", native::_values_sparse);
  m.impl("indices", native::indices_sparse);
  m.impl("values", native::values_sparse);
  m.impl("sparse_resize_", native::sparse_resize_);
  m.impl("sparse_resize_and_clear_", native::sparse_resize_and_clear_);
  m.impl("resize_as_sparse_", native::resize_as_sparse_);
  m.impl("permute", native::permute_sparse_coo);
  m.impl("unsqueeze", native::unsqueeze_sparse);
  m.impl("narrow_copy", native::narrow_copy_sparse);
  m.impl("_sparse_broadcast_to", native::sparse_broadcast_to);
  m.impl("cat", native::cat_sparse);
  m.impl("view_as_real", native::view_as_real_sparse);
  m.impl("view_as_complex", native::view_as_complex_sparse);
  // creation and copies
  m.impl("empty.memory_format", native::empty_sparse_symint);
  m.impl("empty_like", native::empty_like_sparse_coo);
  m.impl("_sparse_coo_tensor_with_dims", native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", native::new_with_dims_and_tensor_sparse_symint);
  m.impl("clone", native::clone_sparse);
  m.impl("copy_", native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", native::copy_sparse_);
  m.impl("zero_", native::zero_sparse_);
  m.impl("zeros.out", native::zeros_sparse_out);
  m.impl("_to_dense", native::sparse_to_dense);
  m.impl("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::sparse_coo_to_sparse));
  m.impl("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::sparse_coo_to_sparse));
  m.impl("_to_sparse_csr", native::coo_to_sparse_csr);
  m.impl("_to_sparse_csc", native::coo_to_sparse_csc);
  m.impl("_to_sparse_bsr", native::coo_to_sparse_bsr);
  m.impl("_to_sparse_bsc", native::coo_to_sparse_bsc);
  // arithmetic on the values
  EACH(COO);
  EACH_OUT(COO_OUT);
  COO(nan_to_num);
  m.impl("neg", native::neg_sparse);
  m.impl("neg_", native::neg_sparse_);
  m.impl("neg.out", native::neg_out_sparse);
  m.impl("relu", native::relu_sparse);
  m.impl("relu_", native::relu_sparse_);
  m.impl("isnan", native::isnan_sparse);
  m.impl("isinf", native::isinf_sparse);
  m.impl("conj_physical.out", native::conj_physical_out_sparse);
  m.impl("threshold_backward", native::threshold_backward_sparse);
  m.impl("threshold_backward.grad_input", native::threshold_backward_sparse_out);
  m.impl("pow.Tensor_Scalar", native::pow_sparse_scalar);
  m.impl("pow.Tensor_Scalar_out", native::pow_out_sparse_scalar);
  m.impl("div.Tensor", static_cast<Tensor (*)(const Tensor&, const Tensor&)>(native::div_sparse));
  m.impl("div_.Tensor", static_cast<Tensor& (*)(Tensor&, const Tensor&)>(native::div_sparse_));
  m.impl("div.out", static_cast<Tensor& (*)(const Tensor&, const Tensor&, Tensor&)>(native::div_out_sparse_zerodim));
  m.impl("div.Tensor_mode", static_cast<Tensor (*)(const Tensor&, const Tensor&, Maybe<c10::string_view>)>(native::div_sparse));
  m.impl("div_.Tensor_mode", static_cast<Tensor& (*)(Tensor&, const Tensor&, Maybe<c10::string_view>)>(native::div_sparse_));
  m.impl("div.out_mode", static_cast<Tensor& (*)(const Tensor&, const Tensor&, Maybe<c10::string_view>, Tensor&)>(native::div_out_sparse_zerodim));
  m.impl("floor_divide", native::floor_divide_sparse);
  m.impl("floor_divide_.Tensor", native::floor_divide_sparse_);
  m.impl("floor_divide.out", native::floor_divide_out_sparse_zerodim);
  // these lead to add.out, mul.out and addmm, whose kernels are in Python
  m.impl("add.Tensor", native::add_sparse);
  m.impl("add_.Tensor", native::add_sparse_);
  m.impl("sub.Tensor", native::sub_sparse);
  m.impl("sub_.Tensor", native::sub_sparse_);
  m.impl("sub.out", native::sub_out_sparse);
  m.impl("mul.Tensor", native::mul_sparse);
  m.impl("mul_.Tensor", native::mul_sparse_);
  m.impl("mm", static_cast<Tensor (*)(const Tensor&, const Tensor&)>(native::_sparse_mm));
  m.impl("mm.out", native::_sparse_mm_out);
  m.impl("mv", native::mv_sparse);
  // reductions
  m.impl("any", native::any_sparse);
  m.impl("sum", native::sum_coo);
  m.impl("sum.dim_IntList", native::sum_sparse_coo);
  m.impl("norm.ScalarOpt_dim", native::sparse_norm);
  m.impl("norm.ScalarOpt_dim_dtype", native::sparse_dtype_norm);
  m.impl("native_norm", static_cast<Tensor (*)(const Tensor&, const at::Scalar&)>(native::norm_sparse));
  m.impl("native_norm.ScalarOpt_dim_dtype", static_cast<Tensor (*)(const Tensor&, const Maybe<at::Scalar>&, at::IntArrayRef, bool, Maybe<at::ScalarType>)>(native::norm_sparse));
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("sparse_dim", native::sparse_dim_sparse_csr);
  m.impl("dense_dim", native::dense_dim_sparse_csr);
  m.impl("_nnz", native::_nnz_sparse_csr);
  m.impl("values", native::values_sparse_csr);
  m.impl("crow_indices", native::crow_indices_sparse_csr);
  m.impl("col_indices", native::col_indices_sparse_csr);
  m.impl("ccol_indices", native::ccol_indices_sparse_csr);
  m.impl("row_indices", native::row_indices_sparse_csr);
  m.impl("select.int", native::select_sparse_csr);
  m.impl("select_copy.int", native::select_copy_sparse_csr);
  m.impl("resize_", native::resize_sparse_csr_);
  m.impl("resize_as_sparse_", native::resize_as_sparse_compressed_);
  m.impl("empty.memory_format", native::empty_sparse_compressed);
  m.impl("empty_like", native::empty_like_sparse_csr);
  m.impl("clone", native::clone_sparse_compressed);
  m.impl("copy_", native::copy_sparse_compressed_);
  m.impl("fill_.Scalar", native::fill_sparse_csr_);
  m.impl("zero_", native::zero_sparse_csr_);
  m.impl("normal_", native::normal_sparse_csr_);
  m.impl("_to_dense", native::sparse_compressed_to_dense);
  m.impl("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::sparse_compressed_to_sparse));
  m.impl("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::sparse_compressed_to_sparse));
  m.impl("sparse_mask", native::sparse_mask_sparse_compressed);
  EACH(CSR);
  EACH_OUT(CSR_OUT);
  CSR_OUT(angle);
  CSR(neg);
  m.impl("relu", native::relu_sparse_csr);
  m.impl("relu_", native::relu_sparse_csr_);
  m.impl("isnan", native::isnan_sparse_csr);
  m.impl("isinf", native::isinf_sparse_csr);
  m.impl("_conj_physical", native::conj_physical_sparse_csr);
  m.impl("conj_physical_", native::conj_physical_sparse_csr_);
  m.impl("conj_physical.out", native::conj_physical_sparse_csr_out);
  m.impl("threshold_backward", native::threshold_backward_sparse_compressed);
  m.impl("threshold_backward.grad_input", native::threshold_backward_sparse_compressed_out);
  m.impl("add.Tensor", native::add_sparse_csr);
  m.impl("add_.Tensor", native::add_sparse_csr_);
  m.impl("mul.Tensor", native::mul_sparse_csr);
  m.impl("mul_.Tensor", native::mul_sparse_csr_);
  m.impl("mul.out", native::mul_out_sparse_csr);
  m.impl("mul.Scalar", native::mul_scalar_sparse_csr);
  m.impl("mul_.Scalar", native::mul__scalar_sparse_csr);
  m.impl("addmm", native::addmm_sparse_compressed_dense);
  m.impl("mm", native::_sparse_csr_mm);
  m.impl("mm.out", native::_sparse_csr_mm_out);
  m.impl("sum", native::sum_csr);
  m.impl("sum.dim_IntList", native::sum_sparse_compressed);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse", static_cast<Tensor (*)(const Tensor&, Maybe<at::Layout>, at::OptionalIntArrayRef, Maybe<int64_t>)>(native::dense_to_sparse));
  m.impl("_to_sparse.sparse_dim", static_cast<Tensor (*)(const Tensor&, int64_t)>(native::dense_to_sparse));
  m.impl("_to_sparse_csr", native::dense_to_sparse_csr);
  m.impl("_to_sparse_csc", native::dense_to_sparse_csc);
  m.impl("_to_sparse_bsr", native::dense_to_sparse_bsr);
  m.impl("_to_sparse_bsc", native::dense_to_sparse_bsc);
}

}  // namespace
}  // namespace torchtpu
