#include "bindings.h"
#include "linear.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

mx::array bind(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& biases, int bits, int group, const std::optional<std::pair<int, int>>& window,
               bool float_out) {
  require(x.ndim() == 2 && weight.ndim() == 2, "x and the weight must have two axes.");
  require(scales.has_value() == biases.has_value(), "Scales and biases come together.");
  Linear call{};
  Matrix& m = call.matrix;
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
  }
  m.type = type_of(scales ? *scales : weight);
  require(x.shape(1) == m.cols, "x must be [tokens, " + std::to_string(m.cols) + "].");
  call.start = window ? window->first : 0;
  call.stop = window ? window->second : m.rows;
  require(0 <= call.start && call.start <= call.stop && call.stop <= m.rows, "The window must lie within the weight's rows.");
  call.tokens = x.shape(0);
  call.x_type = type_of(x);
  call.out_type = float_out ? Type::f32 : call.x_type;

  Arrays inputs{x, weight};
  if (scales) inputs.insert(inputs.end(), {*scales, *biases});
  return ttd::call("linear", std::move(inputs),
                   {{{x.shape(0), static_cast<int>(call.stop - call.start)}, float_out ? mx::float32 : x.dtype()}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     call.matrix.codes = in[1].data<void>();
                     if (in.size() > 2) {
                       call.matrix.scales = in[2].data<void>();
                       call.matrix.biases = in[3].data<void>();
                     }
                     call.out = out[0].data<void>();
                     linear(call);
                   })[0];
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", bind, nb::arg("x"), nb::arg("weight"), nb::arg("scales").none(), nb::arg("biases").none(), nb::arg("bits"),
        nb::arg("group"), nb::arg("window").none() = nb::none(), nb::arg("float_out") = false,
        "x [T, in] times the rows `window` of a stored weight, transposed: [T, n] in x's dtype, or f32.");
}

}  // namespace ttd
