// The routed experts' feed-forward from packed records: silu(gate) * up, down, weighted and summed in ascending expert.
#pragma once

#include "matrix.h"

namespace ttd {

// A matrix within a record; offsets are bytes from the record's start.
struct Part {
  Matrix matrix;
  int64_t codes, scales, biases;

  Matrix in(const uint8_t* record) const {
    Matrix m = matrix;
    m.codes = record + codes;
    m.scales = record + scales;
    m.biases = record + biases;
    return m;
  }
};

struct ExpertFfn {
  Part gate_up, down;
  int64_t stride, slots;
  const uint8_t* records;  // [slots, stride]
  int64_t experts;
  const int32_t* slot_of;  // [experts], -1 where the expert has no slot
  int64_t tokens, choices;
  const int32_t* chosen;  // [tokens, choices], ascending
  const float* weights;   // [tokens, choices], or null for the unweighted outputs
  Type x_type;
  const void* x;  // [tokens, hidden]
  float* out;     // [tokens, hidden], or [tokens, choices, hidden] without weights
  bool accumulate;  // out holds sums to add to
};

// What makes a call unsafe to run, or null.
const char* problem(const ExpertFfn& call);

// Runs a call that has no problem.
void expert_ffn(const ExpertFfn& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "multiply.h"

namespace ttd::TTD_ISA {

// One token's use of one expert.
struct Visit {
  int32_t expert, token, choice;
};

// The visits to experts that have a slot, by expert and then token.
static inline Visit* sort_visits(const ExpertFfn& call, int64_t* count) {
  int32_t* ends = scratch<int32_t>(Scratch::counts, call.experts + 1);
  for (int64_t e = 0; e <= call.experts; ++e) ends[e] = 0;
  const int64_t all = call.tokens * call.choices;
  for (int64_t i = 0; i < all; ++i)
    if (call.slot_of[call.chosen[i]] >= 0) ++ends[call.chosen[i] + 1];
  for (int64_t e = 0; e < call.experts; ++e) ends[e + 1] += ends[e];
  *count = ends[call.experts];
  Visit* visits = scratch<Visit>(Scratch::visits, all);
  for (int64_t i = 0; i < all; ++i) {
    const int32_t expert = call.chosen[i];
    if (call.slot_of[expert] >= 0)
      visits[ends[expert]++] = {expert, static_cast<int32_t>(i / call.choices), static_cast<int32_t>(i % call.choices)};
  }
  return visits;
}

// A run of visits to one expert.
struct Run {
  int32_t first, count;
  const uint8_t* record;
};

// Choices without a slot count as zeros, which a sum of nothing but -0 would show.
static inline void add_missing(const ExpertFfn& call) {
  const int64_t width = call.down.matrix.rows;
  for (int64_t i = 0; i < call.tokens * call.choices; ++i)
    if (call.slot_of[call.chosen[i]] < 0)
      for (int64_t c = 0; c < width; ++c) call.out[i / call.choices * width + c] += 0.0f;
}

// Adds the visits of some runs to columns [first, first + rows) of the result.
static inline void add_down(const ExpertFfn& call, const Run* runs, int n, const Visit* visits, const uint8_t* const* hidden,
                            int64_t first, int rows) {
  float* products = scratch<float>(Scratch::products, block_tokens * block_rows);
  const int64_t width = call.down.matrix.rows;
  for (int i = 0; i < n; ++i) {
    const Run& run = runs[i];
    multiply(call.down.in(run.record), first, rows, hidden + run.first, run.count, products);
    for (int v = 0; v < run.count; ++v) {
      const Visit& visit = visits[run.first + v];
      const int64_t choice = int64_t{visit.token} * call.choices + visit.choice;
      const float* product = products + v * block_rows;
      if (call.weights == nullptr) {
        std::memcpy(call.out + choice * width + first, product, static_cast<size_t>(rows) * sizeof(float));
        continue;
      }
      float* out = call.out + visit.token * width + first;
      const float weight = call.weights[choice];
      const bool starts = visit.choice == 0 && !call.accumulate;
      for (int r = 0; r < rows; ++r) {
        const float weighted = weight * product[r];
        out[r] = starts ? weighted : out[r] + weighted;
      }
    }
  }
}

static void expert_ffn(const ExpertFfn& call) {
  const FloatMode mode(Denormals::kept);
  if (!call.accumulate) {
    const int64_t rows = call.weights ? call.tokens : call.tokens * call.choices;
    std::memset(call.out, 0, static_cast<size_t>(rows * call.down.matrix.rows) * sizeof(float));
  }
  int64_t count = 0;
  const Visit* visits = sort_visits(call, &count);
  const Matrix &up = call.gate_up.matrix, &down = call.down.matrix;
  const int64_t inter = down.cols, x_size = row_size(up), h_size = row_size(down);
  const bool few = call.tokens <= block_tokens;
  uint8_t* inputs = scratch<uint8_t>(Scratch::inputs, (few ? call.tokens : block_tokens) * x_size);
  float* hidden = scratch<float>(Scratch::hidden, block_tokens * inter);
  uint8_t* laid_out = scratch<uint8_t>(Scratch::laid_out, block_tokens * h_size);
  const uint8_t** x = scratch<const uint8_t*>(Scratch::pointers, 2 * block_tokens);
  const uint8_t** h = x + block_tokens;
  const auto lay_out_token = [&](int64_t token, uint8_t* to) {
    with_type(call.x_type, [&](auto* kind) {
      lay_out(up, static_cast<decltype(kind)>(const_cast<void*>(call.x)) + token * up.cols, to);
    });
  };
  if (few) parallel_for(call.tokens, [&](int64_t t) { lay_out_token(t, inputs + t * x_size); });

  // A wave is as many visits, in order of expert, as partial sums are held for.
  for (int64_t start = 0; start < count; start += block_tokens) {
    const int wave = static_cast<int>(count - start < block_tokens ? count - start : block_tokens);
    const Visit* visit = visits + start;
    Run runs[block_tokens];
    int n = 0;
    for (int v = 0; v < wave; ++v) {
      if (v == 0 || visit[v].expert != visit[v - 1].expert)
        runs[n++] = {v, 0, call.records + call.slot_of[visit[v].expert] * call.stride};
      ++runs[n - 1].count;
      x[v] = inputs + (few ? visit[v].token : v) * x_size;
      h[v] = laid_out + v * h_size;
    }
    if (!few) parallel_for(wave, [&](int64_t v) { lay_out_token(visit[v].token, inputs + v * x_size); });

    const int64_t gate_blocks = (inter + block_rows - 1) / block_rows;
    parallel_for(n * gate_blocks, [&](int64_t chunk) {
      const Run& run = runs[chunk / gate_blocks];
      const int64_t first = chunk % gate_blocks * block_rows;
      const int rows = static_cast<int>(inter - first < block_rows ? inter - first : block_rows);
      const Matrix gate_up = call.gate_up.in(run.record);
      float* gate = scratch<float>(Scratch::products, 2 * block_tokens * block_rows);
      float* up_product = gate + block_tokens * block_rows;
      multiply(gate_up, first, rows, x + run.first, run.count, gate);
      multiply(gate_up, inter + first, rows, x + run.first, run.count, up_product);
      for (int v = 0; v < run.count; ++v) {
        float* to = hidden + (run.first + v) * inter + first;
        for (int r = 0; r < rows; r += 16) {
          const Floats value = silu(load(gate + v * block_rows + r)) * load(up_product + v * block_rows + r);
          if (rows - r >= 16)
            store(to + r, value);
          else
            store_some(to + r, value, rows - r);
        }
      }
    });
    parallel_for((wave + 15) / 16, [&](int64_t chunk) {
      for (int64_t v = 16 * chunk; v < wave && v < 16 * (chunk + 1); ++v) lay_out(down, hidden + v * inter, laid_out + v * h_size);
    });

    const int64_t down_blocks = (call.down.matrix.rows + block_rows - 1) / block_rows;
    parallel_for(down_blocks, [&](int64_t chunk) {
      const int64_t first = chunk * block_rows;
      const int rows = static_cast<int>(call.down.matrix.rows - first < block_rows ? call.down.matrix.rows - first : block_rows);
      add_down(call, runs, n, visit, h, first, rows);
    });
  }
  if (call.weights != nullptr && !call.accumulate) add_missing(call);
}

}  // namespace ttd::TTD_ISA
#endif
