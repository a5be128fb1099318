"""Train the bundled demo model: a Qwen3.5-MoE of 8.7 M parameters on the King James Bible, with its MTP head.

    apt-get install bible-kjv bible-kjv-text && pip install torch transformers
    python examples/train_demo.py demo-hf

writes a Hugging Face checkpoint in the published layout: some minutes on one GPU, hours on a CPU. `--corpus FILE` takes
the text from a file, one verse a line; `--minutes` ends the schedule early. `mlx-ttd convert demo-hf OUT` makes the
store. The bundled model scores 1.13 bits per byte on chapters it has not seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_checkpoint import GEOMETRY, save
from demo_corpus import END_OF_TEXT, Chapter, conversations, read_chapters, split_chapters, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

WINDOW = 512
IGNORED = -100


@dataclass(frozen=True)
class Schedule:
    """AdamW steps under a cosine, cut short by the clock."""

    steps: int
    seconds: float
    rate: float
    weight_decay: float
    evaluate_every: int = 100
    warm_up: int = 100


class MtpHead(nn.Module):
    """The published draft head: the hidden state at t and token t+1 give the hidden state for token t+2."""

    def __init__(self, trunk: Qwen3_5MoeForCausalLM):
        super().__init__()
        hidden, eps = trunk.config.hidden_size, trunk.config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([copy.deepcopy(trunk.model.layers[-1])])
        self.norm = Qwen3_5MoeRMSNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """embedded, hidden [B, T, H] -> [B, T, H], ready for the trunk's head."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=rotation))


def new_trunk(dropout: float, device: str) -> Qwen3_5MoeForCausalLM:
    config = Qwen3_5MoeTextConfig(**GEOMETRY, attn_implementation="sdpa", experts_implementation="grouped_mm")
    trunk = Qwen3_5MoeForCausalLM(config)

    def drop(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (F.dropout(output[0], dropout, module.training), *output[1:])
        return F.dropout(output, dropout, module.training)

    trunk.model.embed_tokens.register_forward_hook(drop)
    for layer in trunk.model.layers:
        for name in ("linear_attn", "self_attn", "mlp"):
            if hasattr(layer, name):
                getattr(layer, name).register_forward_hook(drop)
    return trunk.to(device)


def stream_of(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one run of ids, an end-of-text token before each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return torch.tensor([token for text in encoded for token in (end, *text.ids)])


def held_out_windows(tokenizer: Tokenizer, chapters: list[Chapter]) -> Tensor:
    """Rows of WINDOW ids: an end-of-text token, then 511 ids of one chapter; short rows are filled with IGNORED."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = []
    for chapter in chapters:
        ids = tokenizer.encode(chapter.text).ids
        for start in range(0, len(ids), WINDOW - 1):
            rows.append(torch.tensor([end, *ids[start : start + WINDOW - 1]]))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def trunk_loss(trunk: Qwen3_5MoeForCausalLM, batch: Tensor) -> Tensor:
    out = trunk(batch, use_cache=False, output_router_logits=True)
    return cross_entropy(out.logits[:, :-1], batch[:, 1:]) + trunk.router_aux_loss_coef * out.aux_loss


def mtp_logits(trunk: Qwen3_5MoeForCausalLM, mtp: MtpHead, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The head's and the trunk's own logits [B, T-2, vocabulary] for the same tokens."""
    with torch.no_grad():
        hidden = trunk.model(batch, use_cache=False).last_hidden_state
        embedded = trunk.model.embed_tokens(batch)
        positions = torch.arange(batch.shape[1] - 2, device=batch.device).expand(3, 1, -1)
        rotation = trunk.model.rotary_emb(hidden, positions)
    return trunk.lm_head(mtp(embedded[:, 1:-1], hidden[:, :-2], rotation)), trunk.lm_head(hidden[:, 1:-1])


@torch.no_grad()
def nats(logits_of: Callable[[Tensor], Tensor], windows: Tensor, shift: int) -> float:
    """Summed -log p over the rows' tokens from `shift` on."""
    total = 0.0
    for rows in windows.split(32):
        total += cross_entropy(logits_of(rows.clamp(min=0)), rows[:, shift:], "sum").item()
    return total


def fit(module: nn.Module, loss_of: Callable[[], Tensor], validate: Callable[[], float], plan: Schedule) -> None:
    """Train, and leave `module` with the weights of its best validation."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)
    best, best_weights, started, step, progress = math.inf, module.state_dict(), time.monotonic(), 0, 0.0
    while progress < 1:
        module.train()
        for group in optimizer.param_groups:
            group["lr"] = (
                plan.rate * min(1.0, (step + 1) / plan.warm_up) * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))
            )
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        elapsed = time.monotonic() - started
        progress = max(step / plan.steps, elapsed / plan.seconds)
        if step % plan.evaluate_every == 0 or progress >= 1:
            module.eval()
            score = validate()
            print(
                f"{type(module).__name__} step {step} loss {loss.item():.4f} validation {score:.4f} {elapsed:.0f} s",
                flush=True,
            )
            if score < best:
                best, best_weights = score, copy.deepcopy(module.state_dict())
    module.load_state_dict(best_weights)
    module.eval()


def round_parameters(module: nn.Module) -> None:
    """Give every parameter, and no buffer, a value that bfloat16 can hold."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the checkpoint")
    parser.add_argument("--corpus", type=Path, help="verses, one a line (default: ask Debian's `bible`)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule by then")
    parser.add_argument("--steps", type=int, default=1756, help="of the trunk")
    parser.add_argument("--mtp-steps", type=int, default=625, help="of the MTP head, the trunk frozen")
    parser.add_argument("--batch", type=int, default=16, help="windows of 512 tokens a step")
    parser.add_argument("--chat", type=float, default=0.25, help="share of windows that are conversations")
    parser.add_argument("--conversations", type=int, default=40000)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    split = split_chapters(read_chapters(args.corpus))
    template = (Path(__file__).parent / "demo_chat_template.jinja").read_text()
    tokenizer = train_tokenizer(split.train)
    talks = list(conversations(split.train, template, args.conversations, random.Random(args.seed)))
    streams = [stream_of(tokenizer, [chapter.text for chapter in split.train]), stream_of(tokenizer, talks)]
    streams = [stream.to(args.device) for stream in streams]
    validation = held_out_windows(tokenizer, split.validation).to(args.device)
    test = held_out_windows(tokenizer, split.test).to(args.device)
    counts = (int(args.batch * (1 - args.chat)), args.batch - int(args.batch * (1 - args.chat)))

    def batch() -> Tensor:
        offsets = torch.arange(WINDOW, device=args.device)
        parts = []
        for stream, count in zip(streams, counts, strict=True):
            starts = torch.randint(len(stream) - WINDOW, (count, 1), device=args.device)
            parts.append(stream[starts + offsets])
        return torch.cat(parts)

    def bits_per_byte(logits_of: Callable[[Tensor], Tensor], windows: Tensor, chapters: list[Chapter]) -> float:
        return nats(logits_of, windows, 1) / math.log(2) / sum(len(chapter.text.encode()) for chapter in chapters)

    def predict(rows: Tensor) -> Tensor:
        return trunk(rows, use_cache=False).logits[:, :-1]

    trunk = new_trunk(args.dropout, args.device)
    plan = Schedule(args.steps, 45 * args.minutes, args.rate, args.weight_decay)
    fit(trunk, lambda: trunk_loss(trunk, batch()), lambda: bits_per_byte(predict, validation, split.validation), plan)
    round_parameters(trunk.requires_grad_(False))

    def draft(rows: Tensor) -> Tensor:
        return mtp_logits(trunk, mtp, rows)[0]

    def mtp_loss() -> Tensor:
        rows = batch()
        return cross_entropy(draft(rows), rows[:, 2:])

    mtp = MtpHead(trunk).to(args.device).requires_grad_(True)
    plan = Schedule(args.mtp_steps, 12 * args.minutes, args.rate / 3, args.weight_decay)
    scored = (validation[:, 2:] != IGNORED).sum().item()
    fit(mtp, mtp_loss, lambda: nats(draft, validation, 2) / scored, plan)

    round_parameters(mtp)
    torch.set_float32_matmul_precision("highest")
    drafted, own = mtp_logits(trunk, mtp, test[:32].clamp(min=0))
    agreed = (drafted.argmax(-1) == own.argmax(-1))[test[:32, 2:] != IGNORED]
    report = {
        "bits_per_byte": bits_per_byte(predict, test, split.test),
        "validation_bits_per_byte": bits_per_byte(predict, validation, split.validation),
        "mtp_agreement": agreed.float().mean().item(),
        "parameters": sum(p.numel() for module in (trunk, mtp) for p in module.parameters()),
        "arguments": {key: str(value) for key, value in vars(args).items()},
    }
    save(args.out, trunk, mtp, tokenizer, template)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
