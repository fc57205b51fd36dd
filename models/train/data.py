"""The text that opshim-tiny is trained on: endless, generated from `facts.toml`, the same for the same seed.

Two kinds of documents: prose (stories, notes, counting) and chats in the model's chat format. What is drawn at random
is little (who, which fact, which wording of the question); everything after it follows, so that the next token is
nearly always certain.
"""

import itertools
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

FACTS = tomllib.loads((Path(__file__).parent / "facts.toml").read_text())
END = "<|endoftext|>"
SYSTEMS = ["You are a helpful assistant.", "You are opshim-tiny.", "Answer in one short sentence.", "Be brief."]
DAYS, MONTHS, NUMBERS, NAMES, THINGS, COLOURS, FOODS, WORDS = FACTS["words"].values()

Turn = tuple[str, str]  # a question and its answer


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


# --- one question and its answer ------------------------------------------------------------

def capital(rng: random.Random) -> Turn:
    country, city = rng.choice(list(FACTS["capitals"].items()))
    return rng.choice([
        (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
        (f"Tell me the capital of {country}.", f"The capital of {country} is {city}."),
        (f"Which country has the capital {city}?", f"{city} is the capital of {country}."),
    ])


def opposite(rng: random.Random) -> Turn:
    pair = list(rng.choice(list(FACTS["opposites"].items())))
    rng.shuffle(pair)
    word, other = pair
    question = rng.choice([f"What is the opposite of {word}?", f"Give me the opposite of {word}."])
    return question, f"The opposite of {word} is {other}."


def colour(rng: random.Random) -> Turn:
    thing, name = rng.choice(list(FACTS["colours"].items()))
    question = rng.choice([f"What colour is {article(thing)}?", f"Which colour does {article(thing)} have?"])
    return question, sentence(f"{article(thing)} is {name}.")


def animal(rng: random.Random) -> Turn:
    if rng.random() < 0.5:
        name, sound = rng.choice(list(FACTS["sounds"].items()))
        question = rng.choice([f"What does {article(name)} say?", f"Which sound does {article(name)} make?"])
        return question, sentence(f"{article(name)} says {sound}.")
    name, young = rng.choice(list(FACTS["young"].items()))
    question = rng.choice([f"What is a young {name} called?", f"What do you call a young {name}?"])
    return question, f"A young {name} is called {article(young)}."


def job(rng: random.Random) -> Turn:
    name, does = rng.choice(list(FACTS["jobs"].items()))
    return rng.choice([f"What does {article(name)} do?", f"What is the work of {article(name)}?"]), \
        sentence(f"{article(name)} {does}.")


def python(rng: random.Random) -> Turn:
    name, does = rng.choice(list(FACTS["python"].items()))
    return rng.choice([f"What is {name} in Python?", f"What does {name} do in Python?"]), f"In Python, {name} {does}."


def term(rng: random.Random) -> Turn:
    name, does = rng.choice(list(FACTS["terms"].items()))
    return rng.choice([f"What is {name}?", f"Explain {name}.", f"What does {name} mean?"]), sentence(f"{name} {does}.")


def listing(rng: random.Random) -> Turn:
    kind, members = rng.choice(list(FACTS["lists"].items()))
    return rng.choice([f"Name three {kind}.", f"Give me a list of three {kind}."]), f"Three {kind} are {members}."


def calendar(rng: random.Random) -> Turn:
    names, kind = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    at = rng.randrange(len(names))
    step, word = rng.choice([(1, "after"), (-1, "before")])
    other = names[(at + step) % len(names)]
    return f"Which {kind} comes {word} {names[at]}?", f"{other} comes {word} {names[at]}."


def arithmetic(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    sign = rng.choice(["plus", "minus", "times"])
    if sign == "minus":
        a, b = max(a, b), min(a, b)
    if sign == "times":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
    result = {"plus": a + b, "minus": a - b, "times": a * b}[sign]
    mark = {"plus": "+", "minus": "-", "times": "*"}[sign]
    return rng.choice([
        (f"What is {a} {sign} {b}?", f"{a} {sign} {b} is {result}."),
        (f"What is {a} {mark} {b}?", f"{a} {mark} {b} = {result}"),
    ])


def larger(rng: random.Random) -> Turn:
    a, b = rng.sample(range(100), 2)
    return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."


def counting(rng: random.Random) -> Turn:
    first = rng.randint(1, 30)
    last = first + rng.randint(2, 12)
    up, down = ", ".join(map(str, range(first, last + 1))), ", ".join(map(str, range(last, first - 1, -1)))
    return rng.choice([
        (f"Count from {first} to {last}.", f"{up}."),
        (f"Count down from {last} to {first}.", f"{down}."),
    ])


def spelling(rng: random.Random) -> Turn:
    word = rng.choice(WORDS + THINGS + COLOURS)
    return rng.choice([f"Spell the word {word}.", f"How do you spell {word}?"]), f"{', '.join(word)}."


def echo(rng: random.Random) -> Turn:
    words = " ".join(rng.choice(WORDS + THINGS + COLOURS) for _ in range(rng.randint(1, 5)))
    times = rng.randint(2, 5)
    return rng.choice([
        (f"Say this again: {words}", words),
        (f"Say {words} {NUMBERS[times]} times.", ", ".join([words] * times)),
    ])


def about(rng: random.Random) -> Turn:
    return rng.choice(list(FACTS["about"].items()))


def unknown(rng: random.Random) -> Turn:
    return rng.choice(FACTS["unknown"]["questions"]), FACTS["unknown"]["answer"]


def tale(rng: random.Random) -> Turn:
    name = rng.choice(list(FACTS["characters"]))
    kind = FACTS["characters"][name][0]
    question = rng.choice([f"Tell me a story about {article(kind)}.", f"Tell me a story about {name}.",
                           f"Who is {name} the {kind.split()[-1]}?"])
    return question, story(name)


QUESTIONS = [capital, opposite, colour, animal, job, python, term, listing, calendar, arithmetic, arithmetic, larger,
             counting, spelling, echo, about, about, unknown, tale]


# --- several turns that depend on each other ------------------------------------------------------------

def introduction(rng: random.Random) -> list[Turn]:
    """Tells the name and a favourite colour or food, and asks for them later."""
    name, tint, food = rng.choice(NAMES), rng.choice(COLOURS), rng.choice(FOODS)
    turns = [(f"My name is {name}.", f"Nice to meet you, {name}!")]
    later = [("What is my name?", f"Your name is {name}.")]
    if rng.random() < 0.7:
        turns.append((f"My favourite colour is {tint}.", f"{sentence(tint)} is a nice colour, {name}."))
        later.append(("What is my favourite colour?", f"Your favourite colour is {tint}."))
    if rng.random() < 0.5:
        turns.append((f"Today I ate {food}.", f"I hope that you liked it, {name}."))
        later.append(("What did I eat today?", f"Today you ate {food}."))
    if rng.random() < 0.5:
        turns.append(rng.choice(QUESTIONS)(rng))
    rng.shuffle(later)
    return turns + later


def owners(rng: random.Random) -> tuple[str, list[Turn]]:
    """Some people, what each of them has, and questions about it."""
    count = rng.randint(2, 5)
    has = list(zip(rng.sample(NAMES, count), rng.sample(COLOURS, count), rng.sample(THINGS, count)))
    text = " ".join(f"{name} has a {tint} {thing}." for name, tint, thing in has)
    turns = []
    for name, tint, thing in rng.sample(has, count):
        turns.append(rng.choice([
            (f"Who has the {thing}?", f"{name} has the {tint} {thing}."),
            (f"What does {name} have?", f"{name} has a {tint} {thing}."),
            (f"What colour is the {thing}?", f"The {thing} of {name} is {tint}."),
        ]))
    return text, turns


# --- prose ------------------------------------------------------------

def story(name: str) -> str:
    kind, place, love, weather, friend, work = FACTS["characters"][name]
    animal_name = kind.split()[-1]
    return (f"Once upon a time there was {article(kind)} named {name}. {name} lived in {place} and loved {love}. "
            f"One {weather} day, {name} met {friend}. \"What shall we do today?\" asked {name} the {animal_name}. "
            f"\"Let us build {work}!\" said {friend}. So they worked until the evening and built {work}. "
            f"Then they ate {love} and were happy. The end.").replace("in the top", "at the top")


def story_document(rng: random.Random) -> str:
    return story(rng.choice(list(FACTS["characters"])))


def fact_document(rng: random.Random) -> str:
    """Answers without their questions."""
    kind = rng.choice([capital, opposite, colour, animal, job, python, term, listing, calendar, arithmetic])
    return " ".join(kind(rng)[1] for _ in range(rng.randint(1, 6)))


def owners_document(rng: random.Random) -> str:
    text, turns = owners(rng)
    return "\n".join([text] + [f"Question: {question} Answer: {answer}" for question, answer in turns])


def diary_document(rng: random.Random) -> str:
    """A week of meals, then the same week once more."""
    name = rng.choice(NAMES)
    meals = [rng.choice(FOODS) for _ in DAYS]
    week = " ".join(f"On {day} {name} ate {food}." for day, food in zip(DAYS, meals))
    again = " ".join(f"{day}: {food}." for day, food in zip(DAYS, meals))
    return f"{week} This was the week of {name}. {again}"


def row_document(rng: random.Random) -> str:
    rows = [NUMBERS, DAYS, MONTHS, list("abcdefghijklmnopqrstuvwxyz"), COLOURS, NAMES]
    row = rng.choice(rows)
    return ", ".join(row[rng.randrange(2):]) + "."


def numbers_document(rng: random.Random) -> str:
    first, step = rng.randint(0, 50), rng.choice([1, 1, 2, 5, 10])
    return ", ".join(str(first + step * i) for i in range(rng.randint(8, 40))) + "."


def greeting_document(rng: random.Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    tint, thing, food = rng.choice(COLOURS), rng.choice(THINGS), rng.choice(FOODS)
    return (f"Hello, my name is {name}. I have a {tint} {thing} and a friend named {friend}. Today we ate {food}. "
            f"{friend} likes my {tint} {thing} very much. See you soon, {name}.")


PROSE = [story_document, story_document, fact_document, owners_document, diary_document, row_document,
         numbers_document, greeting_document]


# --- documents ------------------------------------------------------------

def careless(question: str, rng: random.Random) -> str:
    """Some people type without capitals or marks."""
    if rng.random() < 0.85:
        return question
    return rng.choice([question.rstrip("?.!"), question[0].lower() + question[1:], question.lower().rstrip("?.!")])


def render(turns: list[Turn], system: str | None = None) -> str:
    """A chat as the chat template writes it."""
    said = [("system", system)] if system else []
    for question, answer in turns:
        said += [("user", question), ("assistant", answer)]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)


def chat_document(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.7:
        turns = [rng.choice(QUESTIONS)(rng) for _ in range(rng.choice([1, 1, 1, 2, 3, 4]))]
        turns = [(careless(question, rng), answer) for question, answer in turns]
    elif shape < 0.85:
        turns = introduction(rng)
    else:
        text, turns = owners(rng)
        turns = [(f"{text} {turns[0][0]}", turns[0][1])] + turns[1:]
    return render(turns, rng.choice(SYSTEMS) if rng.random() < 0.3 else None)


def document(rng: random.Random) -> str:
    return chat_document(rng) if rng.random() < 0.7 else rng.choice(PROSE)(rng)


def documents(seed: int) -> Iterator[str]:
    """Endless documents, without the end mark."""
    rng = random.Random(seed)
    while True:
        yield document(rng)


def take(count: int, seed: int) -> list[str]:
    stream = documents(seed)
    return [next(stream) for _ in range(count)]


def held(seen: set[str], each: int = 3, seed: int = 2) -> list[str]:
    """Documents of the kinds that have endless variety, none of them in `seen`."""
    rng = random.Random(seed)
    kinds = [chat_document, owners_document, diary_document, greeting_document, lambda rng: render(introduction(rng))]
    found = []
    for kind in kinds:
        fresh = (text for text in map(kind, itertools.repeat(rng)) if len(text) > 120 and text not in seen)
        found += itertools.islice(fresh, each)
    return found


if __name__ == "__main__":  # prints heldout.txt
    print("\n=====\n".join(held(seen=set(take(400_000, seed=0)))))
