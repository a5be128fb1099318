// Causal convolution, SiLU, gates, l2 norms and the gated delta rule, token after token, with the state in registers.
// A SIMD-group holds ROWS value channels of one value head: lane l keeps the state of key channels l, l + 32, ...
constexpr int HELD = KEY_DIM / 32;
constexpr int KEYS = KEY_HEADS * KEY_DIM;
constexpr int CHANNELS = 2 * KEYS + VALUE_HEADS * VALUE_DIM;
constexpr int PAST = TAPS - 1;

const int head = threadgroup_position_in_grid.y;
const int lane = thread_index_in_simdgroup;
const int first = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * ROWS;
const int key_head = head / (VALUE_HEADS / KEY_HEADS);
const int tokens = qkv_shape[0];

// Channels of this lane: HELD of q, HELD of k, and the value channels, which all lanes share.
int channel[2 * HELD + ROWS];
for (int i = 0; i < HELD; ++i) {
  channel[i] = key_head * KEY_DIM + lane + 32 * i;
  channel[HELD + i] = KEYS + channel[i];
}
for (int r = 0; r < ROWS; ++r) channel[2 * HELD + r] = 2 * KEYS + head * VALUE_DIM + first + r;

float taps[2 * HELD + ROWS][TAPS];
float past[2 * HELD + ROWS][PAST];
for (int c = 0; c < 2 * HELD + ROWS; ++c) {
  for (int j = 0; j < TAPS; ++j) taps[c][j] = float(conv_weight[channel[c] * TAPS + j]);
  for (int j = 0; j < PAST; ++j) past[c][j] = float(conv_state[j * CHANNELS + channel[c]]);
}
float s[ROWS][HELD];
for (int r = 0; r < ROWS; ++r) {
  for (int i = 0; i < HELD; ++i) s[r][i] = state[((head * VALUE_DIM) + first + r) * KEY_DIM + lane + 32 * i];
}
const float rate = exp_f32(float(a_log[head]));
const float bias = float(dt_bias[head]);

for (int t = 0; t < tokens; ++t) {
  float mixed[2 * HELD + ROWS];
  for (int c = 0; c < 2 * HELD + ROWS; ++c) {
    const float now = float(C(float(qkv[ulong(t) * CHANNELS + channel[c]])));
    float sum = mul_rn(past[c][0], taps[c][0]);
    for (int j = 1; j < PAST; ++j) sum = fma(past[c][j], taps[c][j], sum);
    sum = fma(now, taps[c][PAST], sum);
    for (int j = 0; j + 1 < PAST; ++j) past[c][j] = past[c][j + 1];
    past[c][PAST - 1] = now;
    mixed[c] = div_rn(sum, add_rn(1.0f, exp_f32(-sum)));
  }
  float q_square = 0.0f, k_square = 0.0f;
  for (int i = 0; i < HELD; ++i) {
    q_square = fma(mixed[i], mixed[i], q_square);
    k_square = fma(mixed[HELD + i], mixed[HELD + i], k_square);
  }
  const float q_norm = mul_rn(rsqrt_f32(add_rn(lanes_sum<32>(q_square), 1e-6f)), rsqrt_f32(float(KEY_DIM)));
  const float k_norm = rsqrt_f32(add_rn(lanes_sum<32>(k_square), 1e-6f));
  const float step = add_rn(float(a[t * VALUE_HEADS + head]), bias);
  const float decay = exp_f32(-mul_rn(rate, softplus(step)));
  const float beta = sigmoid(float(b[t * VALUE_HEADS + head]));
  float q[HELD], k[HELD];
  for (int i = 0; i < HELD; ++i) {
    q[i] = mul_rn(mixed[i], q_norm);
    k[i] = mul_rn(mixed[HELD + i], k_norm);
  }
  for (int r = 0; r < ROWS; ++r) {
    float seen = 0.0f;
    for (int i = 0; i < HELD; ++i) {
      s[r][i] = mul_rn(s[r][i], decay);
      seen = fma(s[r][i], k[i], seen);
    }
    const float delta = mul_rn(add_rn(mixed[2 * HELD + r], -lanes_sum<32>(seen)), beta);
    float read = 0.0f;
    for (int i = 0; i < HELD; ++i) {
      s[r][i] = fma(delta, k[i], s[r][i]);
      read = fma(s[r][i], q[i], read);
    }
    read = lanes_sum<32>(read);
    if (lane == 0) out[(ulong(t) * VALUE_HEADS + head) * VALUE_DIM + first + r] = read;
  }
}
for (int r = 0; r < ROWS; ++r) {
  for (int i = 0; i < HELD; ++i) new_state[((head * VALUE_DIM) + first + r) * KEY_DIM + lane + 32 * i] = s[r][i];
}
// Query and key channels are computed by many SIMD-groups; one of them writes their tail.
const bool writes_keys = first == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0;
for (int j = 0; j < PAST; ++j) {
  if (writes_keys) {
    for (int c = 0; c < 2 * HELD; ++c) new_conv_state[j * CHANNELS + channel[c]] = C(past[c][j]);
  }
  if (lane == 0) {
    for (int r = 0; r < ROWS; ++r) new_conv_state[j * CHANNELS + channel[2 * HELD + r]] = C(past[2 * HELD + r][j]);
  }
}
