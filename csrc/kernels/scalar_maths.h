// Functions of one number, in single precision, spelled so that every backend rounds them alike where it can.
FN float softplus(float x) {
  const float u = exp_f32(x > 0.0f ? -x : x);
  const float w = add_rn(1.0f, u);
  // log(1 + u) for small u, where 1 + u has lost its low bits (Kahan).
  const float log1p_u = w == 1.0f ? u : mul_rn(log_f32(w), div_rn(u, add_rn(w, -1.0f)));
  return add_rn(x > 0.0f ? x : 0.0f, log1p_u);
}

FN float swiglu(float gate, float up) { return mul_rn(div_rn(gate, add_rn(1.0f, exp_f32(-gate))), up); }

FN float sigmoid(float x) { return div_rn(1.0f, add_rn(1.0f, exp_f32(-x))); }
