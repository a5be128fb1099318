#include "bindings.h"
#include "isa.h"

namespace mx = mlx::core;

namespace ttd {

Matrix multiplied(Matrix matrix, bool prefill) {
  matrix.rounded = prefill && matrix.format == Format::int4 && bf16_products();
  return matrix;
}

Stored::Stored(const mx::array& weight, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, int bits,
               int group)
    : arrays{weight} {
  require(weight.ndim() == 2, "The weight must have two axes.");
  require(scales.has_value() == biases.has_value(), "Scales and biases come together.");
  Matrix& m = matrix;
  m.rows = weight.shape(0);
  m.cols = weight.shape(1);
  if (scales) {
    require(weight.dtype() == mx::uint32, "Codes must be uint32.");
    require(bits == 4 || bits == 8, "Native products take codes of 4 or 8 bits.");
    require(group == 32 || group == 64 || group == 128, "Native products take groups of 32, 64 or 128.");
    m.format = bits == 4 ? Format::int4 : Format::int8;
    m.group = group;
    m.cols = m.cols * 32 / bits;
    const mx::Shape shape{weight.shape(0), static_cast<int>(m.groups())};
    require(m.cols % group == 0 && scales->shape() == shape && biases->shape() == shape && scales->dtype() == biases->dtype(),
            "Scales and biases must be [out, in / group] and of one dtype.");
    arrays.insert(arrays.end(), {*scales, *biases});
  }
  m.type = type_of(scales ? *scales : weight);
}

void add_weight(Arrays& inputs, const Stored& weight) {
  inputs.insert(inputs.end(), weight.arrays.begin(), weight.arrays.end());
}

size_t point_at(Matrix& m, const Arrays& inputs, size_t first) {
  m.codes = inputs[first].data<void>();
  if (m.format == Format::plain) return first + 1;
  m.scales = inputs[first + 1].data<void>();
  m.biases = inputs[first + 2].data<void>();
  return first + 3;
}

void require_rows(const mx::array& x, const Stored& weight) {
  require(x.ndim() == 2 && x.shape(1) == weight.matrix.cols, "x must be [tokens, " + std::to_string(weight.matrix.cols) + "].");
}

}  // namespace ttd
