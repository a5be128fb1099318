// The instruction sets that the operations are compiled for, and which one runs.
#pragma once

namespace ttd {

// amx is avx512 with matrix tiles for the dense products of a prefill.
enum class Isa { portable, avx2, avx512, amx };

bool supported(Isa isa);
Isa isa();  // the best one supported, unless set_isa chose another
void set_isa(Isa isa);

// Whether a prefill's products of 4-bit weights can be made in bf16, and whether this thread asks for that.
bool has_bf16_products();
bool bf16_products();
void set_bf16_products(bool on);
const char* name(Isa isa);

struct Operations;
extern const Operations portable_operations, avx2_operations, avx512_operations;
const Operations& operations();  // those of isa()

}  // namespace ttd
