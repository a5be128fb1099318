#include "bindings.h"

#include <stdexcept>

#include "isa.h"
#include "pool.h"

namespace nb = nanobind;

namespace {

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (auto isa : {ttd::Isa::portable, ttd::Isa::avx2, ttd::Isa::avx512, ttd::Isa::amx})
    if (ttd::supported(isa)) names.push_back(ttd::name(isa));
  return names;
}

void set_isa(const std::string& name) {
  for (auto isa : {ttd::Isa::portable, ttd::Isa::avx2, ttd::Isa::avx512, ttd::Isa::amx})
    if (name == ttd::name(isa) && ttd::supported(isa)) return ttd::set_isa(isa);
  throw std::invalid_argument("This processor has no instruction set '" + name + "'; see isas().");
}

void set_threads(int count) {
  if (count < 1) throw std::invalid_argument("set_threads needs at least one thread.");
  ttd::set_threads(count);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("isas", supported_isas, "The instruction sets that can be forced here.");
  m.def("isa", [] { return std::string(ttd::name(ttd::isa())); }, "The instruction set in use.");
  m.def("set_isa", set_isa, nb::arg("name"), "Force an instruction set; ValueError if this processor lacks it.");
  m.def("threads", ttd::threads, "Threads that take part in an operation.");
  m.def("set_threads", set_threads, nb::arg("count"), "Resize the thread pool.");
  m.def("has_bf16_products", ttd::has_bf16_products, "Whether a prefill's products can be those of bf16 here.");
  m.def("set_bf16_products", ttd::set_bf16_products, nb::arg("on"), "Ask for them in what this thread calls from now on.");
  ttd::bind_attention(m);
  ttd::bind_delta_mixer(m);
  ttd::bind_expert_ffn(m);
  ttd::bind_gated_delta(m);
  ttd::bind_linear(m);
  ttd::bind_moe(m);
  ttd::bind_norms(m);
  ttd::bind_quantize(m);
  ttd::bind_read_pool(m);
  ttd::bind_router(m);
  ttd::bind_top(m);
}
