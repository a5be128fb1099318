#include <tuple>

#include "bindings.h"
#include "linear.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

Linear call_of(const mx::array& x, const Stored& w, bool prefill) {
  require_rows(x, w);
  Linear call{};
  call.matrix = multiplied(w.matrix, prefill);
  call.stop = w.matrix.rows;
  call.tokens = x.shape(0);
  call.x_type = call.out_type = type_of(x);
  call.prefill = prefill;
  return call;
}

mx::array bind_linear_one(const mx::array& x, const Stored& w, const std::optional<std::pair<int, int>>& window, bool float_out,
                          bool prefill) {
  Linear call = call_of(x, w, prefill);
  if (window) std::tie(call.start, call.stop) = *window;
  require(0 <= call.start && call.start <= call.stop && call.stop <= w.matrix.rows, "The window must lie within the weight's rows.");
  if (float_out) call.out_type = Type::f32;
  Arrays inputs{x};
  add_weight(inputs, w);
  return ttd::call("linear", std::move(inputs),
                   {{{x.shape(0), static_cast<int>(call.stop - call.start)}, float_out ? mx::float32 : x.dtype()}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     point_at(call.matrix, in, 1);
                     call.out = out[0].data<void>();
                     linear_all(&call, 1);
                   })[0];
}

std::pair<mx::array, mx::array> bind_linear_pair(const mx::array& x, const Stored& w, const Stored& v, bool prefill) {
  Linear first = call_of(x, w, prefill), second = call_of(x, v, prefill);
  Arrays inputs{x};
  add_weight(inputs, w);
  add_weight(inputs, v);
  auto out = ttd::call("linear_pair", std::move(inputs),
                       {{{x.shape(0), static_cast<int>(first.stop)}, x.dtype()}, {{x.shape(0), static_cast<int>(second.stop)}, x.dtype()}},
                       [first, second](const Arrays& in, Arrays& out) mutable {
                         first.x = second.x = in[0].data<void>();
                         point_at(second.matrix, in, point_at(first.matrix, in, 1));
                         first.out = out[0].data<void>();
                         second.out = out[1].data<void>();
                         const Linear calls[]{first, second};
                         linear_all(calls, 2);
                       });
  return {out[0], out[1]};
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Stored>(m, "Weight", "A matrix [out, in], plain or affine codes of 4 or 8 bits.")
      .def(nb::init<const mx::array&, const std::optional<mx::array>&, const std::optional<mx::array>&, int, int>(),
           nb::arg("weight"), nb::arg("scales").none(), nb::arg("biases").none(), nb::arg("bits"), nb::arg("group"));
  m.def("linear", bind_linear_one, nb::arg("x"), nb::arg("weight"), nb::arg("window").none() = nb::none(),
        nb::arg("float_out") = false, nb::arg("prefill") = false,
        "x [T, in] times the rows `window` of a stored weight, transposed: [T, n] in x's dtype, or f32.");
  m.def("linear_pair", bind_linear_pair, nb::arg("x"), nb::arg("w"), nb::arg("v"), nb::arg("prefill") = false,
        "x [T, in] times each of two stored weights, transposed.");
}

}  // namespace ttd
