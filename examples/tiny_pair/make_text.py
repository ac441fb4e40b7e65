"""Seeded text for the tiny pair: a small invented language with rules.

Two wishes pull against each other. Greedy text must be sharp (few near-ties, so that two engines agree in
float32) and must not fall into a loop; drafts must be often right, but not always. So nearly every choice is
a *rule*: a fixed table over what the text already says (who, where, which thing), kept with probability
``KEEP`` and broken otherwise. A rule over one key is easy to look ahead through, a rule over two keys needs
the target's depth, and copies, sorting, counting and sums need the earlier text. Every document hands its last
name, thing and number to the next one, so a long stream walks through many states before it repeats.

Run as a script to print a sample: ``python make_text.py --seed 1 --documents 5``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

USER, ASSISTANT, EOS, BOS, PAD, MASK = "<|user|>", "<|assistant|>", "<|eos|>", "<|bos|>", "<|pad|>", "<|mask|>"
SPECIALS = [PAD, BOS, EOS, MASK, USER, ASSISTANT]  # ids 0..5 in this order

NAMES = "Anna Ben Carla David Emma Felix Greta Hugo Iris Jonas Klara Leo Mona Nils Olga Paul".split()
PLACES = "market river forest harbour school bridge garden tower mill station".split()
THINGS = "apple book candle drum egg flute hammer jar key lamp map needle rope stone violin wheel".split()
COLOURS = "red blue green white black yellow".split()
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
OPPOSITES = [("hot", "cold"), ("big", "small"), ("old", "new"), ("dark", "light"), ("fast", "slow"), ("wet", "dry")]

KEEP = 0.85  # how often a rule is kept; the rest is a uniform choice, so no continuation is certain
_TABLE_SEED = 20_240  # the rules themselves never change with the text's seed


def _table(name: str, rows: int, values: int) -> list[int]:
    """A fixed table of ``rows`` entries below ``values``, as evenly used as possible."""
    rng = random.Random(f"{_TABLE_SEED}/{name}")
    entries = [i % values for i in range(rows)]
    rng.shuffle(entries)
    return entries


def _cycle(name: str, size: int) -> list[int]:
    """A permutation with one cycle through everything: following it never gets stuck in a short loop."""
    order = list(range(size))
    random.Random(f"{_TABLE_SEED}/{name}").shuffle(order)
    step = [0] * size
    for here, there in zip(order, order[1:] + order[:1]):
        step[here] = there
    return step


NEXT_NAME = _cycle("name", len(NAMES))
NEXT_PLACE = _cycle("place", len(PLACES))
NEXT_THING = _cycle("thing", len(THINGS))
FRIEND = _table("friend", len(NAMES), len(NAMES))
COLOUR_OF = _table("colour", len(THINGS), len(COLOURS))
HOME_OF = _table("home", len(NAMES), len(PLACES))
FORM_AT = _table("form", len(NAMES) * len(PLACES), 5)  # two keys: who and where
THING_AT = _table("thing at", len(NAMES) * len(PLACES), len(THINGS))  # two keys
ADDEND = [3, 7, 4, 9, 6, 2, 8, 5, 1, 7]  # by the last digit of the running sum
FACTOR = [2, 4, 3, 5, 2, 6, 3, 7, 4, 9]
NEXT_KIND = {"diary": "list", "list": "chat", "chat": "gift", "gift": "sum", "sum": "code", "code": "box",
             "box": "count", "count": "diary"}


class TextMaker:
    """Makes documents; ``rng`` decides only where a rule is broken and how the first document starts."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(f"tiny-pair/{seed}")
        self.name = self.rng.randrange(len(NAMES))
        self.thing = self.rng.randrange(len(THINGS))
        self.number = self.rng.randrange(1, 10)
        self.kind = self.rng.choice(list(NEXT_KIND))

    def _rule(self, value: int, size: int) -> int:
        return value if self.rng.random() < KEEP else self.rng.randrange(size)

    def document(self) -> str:
        """One document, ended by EOS."""
        makers: dict[str, Callable[[], str]] = {
            "diary": self._diary, "list": self._list, "chat": self._chat, "gift": self._gift, "sum": self._sum,
            "code": self._code, "box": self._box, "count": self._count}
        text = makers[self.kind]()
        kinds = list(NEXT_KIND)
        self.kind = kinds[self._rule(kinds.index(NEXT_KIND[self.kind]), len(kinds))]
        return text + EOS

    def stream(self, documents: int) -> str:
        return "".join(self.document() for _ in range(documents))

    # -- the eight kinds ------------------------------------------------------------------------------------
    def _diary(self) -> str:
        """Places follow one cycle; what happens there depends on who and where together."""
        who = self._rule(NEXT_NAME[self.name], len(NAMES))
        place = self._rule(HOME_OF[who], len(PLACES))
        lines = [f"Diary of {NAMES[who]}."]
        for day in range(1, 4 + who % 3):
            key = who * len(PLACES) + place
            form = self._rule(FORM_AT[key], 5)
            thing = self._rule(THING_AT[key], len(THINGS))
            colour = self._rule(COLOUR_OF[thing], len(COLOURS))
            n, p, t, c, f = NAMES[who], PLACES[place], THINGS[thing], COLOURS[colour], NAMES[FRIEND[who]]
            lines.append(f"Day {day}: " + (
                f"{n} went to the {p} and bought a {c} {t}.",
                f"At the {p} {n} found a {c} {t} and kept it.",
                f"It rained, so {n} stayed at the {p} and drew a {t}.",
                f"{n} met {f} at the {p}. They shared a {c} {t}.",
                f"The {p} was closed. {n} lost the {t} on the way home.")[form])
            self.thing = thing
            place = self._rule(NEXT_PLACE[place], len(PLACES))
        self.name = who
        return "\n".join(lines) + "\nThe end.\n"

    def _gift(self) -> str:
        """One thing goes from hand to hand: its name is copied, the names follow the cycle."""
        giver, thing = self._rule(NEXT_NAME[self.name], len(NAMES)), self._rule(NEXT_THING[self.thing], len(THINGS))
        what = f"{COLOURS[self._rule(COLOUR_OF[thing], len(COLOURS))]} {THINGS[thing]}"
        text = f"{NAMES[giver]} had a {what}."
        for _ in range(2 + thing % 3):
            taker = self._rule(NEXT_NAME[giver], len(NAMES))
            place = self._rule(HOME_OF[taker], len(PLACES))
            text += (f" {NAMES[giver]} gave the {what} to {NAMES[taker]}."
                     f"\n{NAMES[taker]} took the {what} to the {PLACES[place]}.")
            giver = taker
        self.name, self.thing = giver, thing
        return text + f" There {NAMES[giver]} kept it.\n"

    def _items(self) -> list[int]:
        items = [self._rule(NEXT_THING[self.thing], len(THINGS))]
        for _ in range(2 + items[0] % 3):
            fresh = [t for t in range(len(THINGS)) if t not in items]
            step = NEXT_THING[items[-1]]
            items.append(step if step in fresh and self.rng.random() < KEEP else self.rng.choice(fresh))
        self.thing = items[-1]
        return items

    def _list(self) -> str:
        """A list, then the same list copied, reversed and sorted."""
        items = self._items()

        def line(label: str, order: Sequence[int]) -> str:
            return f"{label}: " + ", ".join(THINGS[i] for i in order) + ".\n"

        return (line("List", items) + line("Copy", items) + line("Reverse", items[::-1])
                + line("Sorted", sorted(items)))  # THINGS is in alphabetical order

    def _sum(self) -> str:
        """A running sum; the next addend follows from the last digit."""
        total = self._rule(self.number, 10)
        parts = []
        while total < 40:
            add = self._rule(ADDEND[total % 10], 10)
            parts.append(f"{total} + {add} = {total + add}")
            total += add
            if len(parts) == 8:
                break
        self.number = total % 10
        return "Sum: " + ", ".join(parts) + f".\nTotal: {total}.\n"

    def _count(self) -> str:
        """Counting by a step, up to 40."""
        step = 1 + self._rule(self.number, 9) % 9
        start = self._rule(FACTOR[step], 10)
        numbers = list(range(start, 41, step))[:10]
        self.number = numbers[-1] % 10
        return f"Count by {WORDS[step]} from {start}: " + ", ".join(map(str, numbers)) + ".\n"

    def _box(self) -> str:
        """Two counters that change line by line."""
        left, right = 3 + self.number % 5, 2 + self.thing % 5
        a = COLOURS[self._rule(COLOUR_OF[self.thing], len(COLOURS))]
        b = COLOURS[(COLOURS.index(a) + 1) % len(COLOURS)]
        lines = [f"Box: {left} {a}, {right} {b}."]
        for _ in range(4):
            if self._rule((left + right) % 2, 2):
                left, verb = left - 1, f"Take one {a}."
            else:
                right, verb = right + 1, f"Add one {b}."
            lines.append(f"{verb} Box: {left} {a}, {right} {b}.")
            if left == 0:
                break
        self.number = (left + right) % 10
        return "\n".join(lines) + "\n"

    def _code(self) -> str:
        """Little functions; the name states the body, the call's result is computed."""
        text = ""
        number = self._rule(self.number, 10)
        for _ in range(2):
            c = self._rule(FACTOR[number], 10)
            times = self._rule(number % 2, 2)
            op, verb, result = ("*", "times", number * c) if times else ("+", "add", number + c)
            text += (f"def {verb}_{WORDS[c]}(x):\n    return x {op} {c}\n"
                     f"print({verb}_{WORDS[c]}({number}))  # {result}\n")
            number = result % 10
        self.number = number
        return text

    def _chat(self) -> str:
        """Question and answer turns; every answer ends with EOS, as a served model's would."""
        turns = []
        for _ in range(3):
            form = self._rule((self.name + self.thing) % 5, 5)
            turns.append(f"{USER}" + self._question(form))
        return EOS.join(turns)

    def _question(self, form: int) -> str:
        if form == 0:
            self.name = self._rule(NEXT_NAME[self.name], len(NAMES))
            n = NAMES[self.name]
            return f"Where does {n} live?{ASSISTANT}{n} lives at the {PLACES[HOME_OF[self.name]]}."
        if form == 1:
            self.thing = self._rule(NEXT_THING[self.thing], len(THINGS))
            t = THINGS[self.thing]
            return f"What colour is the {t}?{ASSISTANT}The {t} is {COLOURS[COLOUR_OF[self.thing]]}."
        if form == 2:
            a = self.number
            b = self._rule(ADDEND[a], 10)
            self.number = (a + b) % 10
            self.thing = self._rule(NEXT_THING[self.thing], len(THINGS))
            return f"What is {a} plus {b}?{ASSISTANT}{a} plus {b} is {a + b}."
        if form == 3:
            items = [THINGS[i] for i in self._items()]
            return f"Please reverse: {', '.join(items)}.{ASSISTANT}Reversed: {', '.join(items[::-1])}."
        self.name = self._rule(NEXT_NAME[self.name], len(NAMES))
        pair = OPPOSITES[self.name % len(OPPOSITES)]
        n = NAMES[self.name]
        return f"{n} asks: what is the opposite of {pair[0]}?{ASSISTANT}The opposite of {pair[0]} is {pair[1]}, {n}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=10)
    arguments = parser.parse_args()
    print(TextMaker(arguments.seed).stream(arguments.documents))


if __name__ == "__main__":
    main()
