#include "bindings.h"
#include "linear.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

mx::array bind(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& biases, int bits, int group, const std::optional<std::pair<int, int>>& window,
               bool float_out, bool prefill) {
  Linear call{};
  Matrix& m = call.matrix = stored_matrix(weight, scales, biases, bits, group);
  require(x.ndim() == 2 && x.shape(1) == m.cols, "x must be [tokens, " + std::to_string(m.cols) + "].");
  call.start = window ? window->first : 0;
  call.stop = window ? window->second : m.rows;
  require(0 <= call.start && call.start <= call.stop && call.stop <= m.rows, "The window must lie within the weight's rows.");
  call.tokens = x.shape(0);
  call.x_type = type_of(x);
  call.prefill = prefill;
  call.out_type = float_out ? Type::f32 : call.x_type;

  return ttd::call("linear", with_matrix({x}, weight, scales, biases),
                   {{{x.shape(0), static_cast<int>(call.stop - call.start)}, float_out ? mx::float32 : x.dtype()}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     point_at(call.matrix, in, 1);
                     call.out = out[0].data<void>();
                     linear(call);
                   })[0];
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", bind, nb::arg("x"), nb::arg("weight"), nb::arg("scales").none(), nb::arg("biases").none(), nb::arg("bits"),
        nb::arg("group"), nb::arg("window").none() = nb::none(), nb::arg("float_out") = false, nb::arg("prefill") = false,
        "x [T, in] times the rows `window` of a stored weight, transposed: [T, n] in x's dtype, or f32.");
}

}  // namespace ttd
