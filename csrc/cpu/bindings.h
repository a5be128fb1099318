// What each bind_*.cpp adds to the Python module, and how a stored weight reaches an operation.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "matrix.h"
#include "primitive.h"

namespace ttd {

void bind_attention(nanobind::module_& m);
void bind_expert_ffn(nanobind::module_& m);
void bind_gated_delta(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_norms(nanobind::module_& m);
void bind_read_pool(nanobind::module_& m);
void bind_router(nanobind::module_& m);

// The matrix that a Weight's arrays describe, without pointers; std::invalid_argument where they do not fit together.
Matrix stored_matrix(const mlx::core::array& weight, const std::optional<mlx::core::array>& scales,
                     const std::optional<mlx::core::array>& biases, int bits, int group);

// `inputs` and the weight's arrays after them, which point_at finds from index `first` on.
Arrays with_matrix(Arrays inputs, const mlx::core::array& weight, const std::optional<mlx::core::array>& scales,
                   const std::optional<mlx::core::array>& biases);
void point_at(Matrix& m, const Arrays& inputs, size_t first);

}  // namespace ttd
