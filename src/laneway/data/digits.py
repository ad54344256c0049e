"""Handwritten digits of 8×8 pixels and questions about them: images that come with a package, so nothing is downloaded.

The images are those of scikit-learn's ``load_digits`` (the test set of Alpaydin and Kaynak, *Optical Recognition of Handwritten
Digits*, UCI, 1998). The questions come in pairs of which exactly one holds for any digit ("is it even ?", "is it odd ?"). So
where all are asked of an image, the image alone tells nothing about the answers: half of them are yes, whatever it shows.

Shapes: N images, Q questions, W words of a question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.core import InputError

PIXEL_MAX = 16.0  # pixels count the dark dots of a 4×4 field
HELD_OUT = 0.25
SPLIT_SEED = 0  # the same images are held out whatever the seed of a run


@dataclass(frozen=True)
class Digits:
    """``images`` [N, 1, 8, 8] in fp32 from 0 to 1, ``labels`` [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, picks: Tensor) -> Digits:
        """The images at these places."""
        return Digits(self.images[picks], self.labels[picks])


def load_digits() -> tuple[Digits, Digits]:
    """All digits, shuffled once: those to train on and a quarter held out.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        accepted = "a dataset whose package is installed"
        raise InputError("dataset", "digits", accepted, "scikit-learn is missing: pip install 'laneway[vision]'") from error
    images, labels = load(return_X_y=True)
    whole = Digits(torch.tensor(images, dtype=torch.float32).div_(PIXEL_MAX).view(-1, 1, 8, 8), torch.tensor(labels).long())
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out = int(HELD_OUT * len(whole))
    return whole.take(order[held_out:]), whole.take(order[:held_out])


@dataclass(frozen=True)
class Question:
    """A text of words and whether it holds for a digit."""

    text: str
    holds: Callable[[Tensor], Tensor]


def _thresholds(limits: tuple[int, ...]) -> list[Question]:
    """ "Is it greater than k ?" and its opposite, "is it less than k + 1 ?", for each limit k."""
    found = []
    for k in limits:
        found.append(Question(f"is it greater than {k} ?", lambda digit, k=k: digit > k))
        found.append(Question(f"is it less than {k + 1} ?", lambda digit, k=k: digit < k + 1))
    return found


QUESTIONS = (
    Question("is it even ?", lambda digit: digit % 2 == 0),
    Question("is it odd ?", lambda digit: digit % 2 == 1),
    *_thresholds((3, 4, 5)),
)
WORDS = ("", *dict.fromkeys(word for question in QUESTIONS for word in question.text.split()))
"""The vocabulary; word 0 is the padding."""
CONTEXT = max(len(question.text.split()) for question in QUESTIONS)


def encode(text: str, context: int = CONTEXT) -> list[int]:
    """Words of a text as tokens, padded with zeros to ``context``.

    Raises:
        InputError: a word is not in the vocabulary, or the text is too long.
    """
    words = text.split()
    for word in words:
        if word not in WORDS:
            raise InputError("question", text, "words among " + " ".join(WORDS[1:]), f"{word!r} is not one of them")
    if len(words) > context:
        raise InputError("question", text, f"at most {context} words")
    return [WORDS.index(word) for word in words] + [0] * (context - len(words))


@dataclass(frozen=True)
class Answers:
    """Questions about images: ``images`` [M, 1, 8, 8], ``words`` [M, W], ``answers`` [M] (1: yes)."""

    images: Tensor
    words: Tensor
    answers: Tensor


def ask(digits: Digits, picks: Tensor, questions: Tensor) -> Answers:
    """Question number ``questions[i]`` about image number ``picks[i]``, for every i."""
    words = torch.tensor([encode(question.text) for question in QUESTIONS])[questions]
    held = torch.stack([question.holds(digits.labels[picks]) for question in QUESTIONS], dim=1)
    return Answers(digits.images[picks], words, held.gather(1, questions[:, None]).squeeze(1).long())


def ask_all(digits: Digits) -> Answers:
    """Every question about every image."""
    picks = torch.arange(len(digits)).repeat_interleave(len(QUESTIONS))
    return ask(digits, picks, torch.arange(len(QUESTIONS)).repeat(len(digits)))


def best_alone(digits: Digits) -> dict[str, float]:
    """Largest share of ``ask_all``'s answers that any function of one input alone gives right: ``image`` and ``text``.

    The best such function says, for each value of its input, what holds more often for it: for an image over all questions, for
    a question over all images. It may even know these images, so no training can reach more.
    """
    held = torch.stack([question.holds(digits.labels) for question in QUESTIONS], dim=1).double()
    share = {"image": held.mean(1), "text": held.mean(0)}
    return {name: torch.maximum(yes, 1 - yes).mean().item() for name, yes in share.items()}
