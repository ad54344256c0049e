"""Digits and questions about them."""

from __future__ import annotations

import sys

import pytest
import torch

from laneway.core import InputError
from laneway.data import digits
from laneway.data.digits import CONTEXT, QUESTIONS, WORDS, Digits, ask, ask_all, best_alone, encode, load_digits


@pytest.fixture(scope="module")
def halves():
    pytest.importorskip("sklearn", reason="scikit-learn is missing: pip install 'laneway[vision]'")
    return load_digits()


def test_images_are_split_once_and_none_is_in_both(halves):
    train, test = halves
    assert (len(train), len(test)) == (1348, 449)
    assert train.images.shape == (1348, 1, 8, 8)
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert sorted(test.labels.unique().tolist()) == list(range(10))
    again = load_digits()[1]
    assert torch.equal(again.images, test.images)
    pixels = {tuple(image.flatten().tolist()) for image in train.images}
    assert not any(tuple(image.flatten().tolist()) in pixels for image in test.images)


def test_exactly_one_of_two_neighbouring_questions_holds():
    every = torch.arange(10)
    for a, b in zip(QUESTIONS[::2], QUESTIONS[1::2], strict=True):
        assert (a.holds(every) ^ b.holds(every)).all(), (a.text, b.text)


@pytest.mark.parametrize(
    ("text", "yes"),
    [("is it even ?", {0, 2, 4, 6, 8}), ("is it greater than 5 ?", {6, 7, 8, 9}), ("is it less than 4 ?", {0, 1, 2, 3})],
)
def test_questions_mean_what_they_say(text, yes):
    (question,) = [question for question in QUESTIONS if question.text == text]
    assert {d for d in range(10) if question.holds(torch.tensor(d))} == yes


def test_texts_become_words_and_padding():
    assert encode("is it even ?") == [WORDS.index(word) for word in ("is", "it", "even", "?")] + [0, 0]
    assert len({tuple(encode(question.text)) for question in QUESTIONS}) == len(QUESTIONS)
    assert all(0 not in encode(question.text)[: len(question.text.split())] for question in QUESTIONS)


@pytest.mark.parametrize(
    ("text", "part"), [("is it blue ?", "'blue' is not one of them"), ("is " * 7, f"at most {CONTEXT} words")]
)
def test_other_texts_are_refused(text, part):
    with pytest.raises(InputError) as caught:
        encode(text)
    assert caught.value.field == "question"
    assert part in str(caught.value)


def test_answers_belong_to_their_image_and_question():
    some = Digits(torch.randn(3, 1, 8, 8), torch.tensor([2, 7, 4]))
    asked = ask(some, torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert asked.answers.tolist() == [1, 0]
    assert torch.equal(asked.images, some.images[[1, 0]])
    assert asked.words.tolist() == [encode("is it odd ?")] * 2
    assert len(ask_all(some).answers) == 3 * len(QUESTIONS)


def test_either_input_alone_tells_little(halves):
    found = best_alone(halves[1])
    assert found["image"] == 0.5
    assert found["text"] < 0.6
    asked = ask_all(halves[1])
    share = {}
    for words, answer in zip(asked.words.tolist(), asked.answers.tolist(), strict=True):
        share.setdefault(tuple(words), []).append(answer)
    right = sum(max(sum(answers), len(answers) - sum(answers)) for answers in share.values())
    assert found["text"] == pytest.approx(right / len(asked.answers))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"laneway\[vision\]"):
        digits.load_digits()
