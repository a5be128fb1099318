// What each bind_*.cpp adds to the Python module, and how a stored weight reaches an operation.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "expert_ffn.h"
#include "gated_delta.h"
#include "primitive.h"

namespace ttd {

void bind_attention(nanobind::module_& m);
void bind_delta_mixer(nanobind::module_& m);
void bind_expert_ffn(nanobind::module_& m);
void bind_gated_delta(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_norms(nanobind::module_& m);
void bind_quantize(nanobind::module_& m);
void bind_read_pool(nanobind::module_& m);
void bind_router(nanobind::module_& m);
void bind_top(nanobind::module_& m);

// The matrix as a call multiplies by it: where this thread asks for them, a prefill's products are those of bf16.
Matrix multiplied(Matrix matrix, bool prefill);

// A stored weight: the matrix that its arrays describe, without pointers, and the arrays.
struct Stored {
  Matrix matrix;
  Arrays arrays;

  // std::invalid_argument where the arrays do not fit together.
  Stored(const mlx::core::array& weight, const std::optional<mlx::core::array>& scales,
         const std::optional<mlx::core::array>& biases, int bits, int group);
};

// Appends the weight's arrays to `inputs`.
void add_weight(Arrays& inputs, const Stored& weight);

// Points m at its arrays among `inputs`, which begin at index `first`; returns the index after them.
size_t point_at(Matrix& m, const Arrays& inputs, size_t first);

// std::invalid_argument unless x is [tokens, the weight's columns].
void require_rows(const mlx::core::array& x, const Stored& weight);

// Where the parts of a record lie.
struct Layout {
  Part gate_up, down;
};

// A call of expert_ffn on these arrays, without pointers. std::invalid_argument where they do not fit together, or are
// known and out of range.
ExpertFfn expert_call(const mlx::core::array& x, const mlx::core::array& records, const mlx::core::array& slot_of,
                      const mlx::core::array& chosen, const Layout& layout);

// A call of gated_delta on these arrays, without pointers, tokens and the types of what it reads a token.
GatedDelta delta_call(const mlx::core::array& conv_state, const mlx::core::array& conv_weight, const mlx::core::array& a_log,
                      const mlx::core::array& dt_bias, const mlx::core::array& state, int key_heads);

// std::invalid_argument for a call, by now with pointers, that is unsafe to run.
void check(const ExpertFfn& call);

}  // namespace ttd
