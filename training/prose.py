"""Plain English made by a grammar: stories, descriptions, facts, dialogues, instructions.

A paragraph keeps its person, its place and its object from the first sentence to the last;
which they are, and which sentence follows, is drawn. One beginning in 64, the first two
sentences, is never trained on, which one being decided by its digest.
"""

import random
import re

from training.problems import text_is_held_out
from training.prose_words import ANIMALS, TASKS, TRADES, WORDS
from training.vocabulary import PERSON, with_article

FEWEST_WORDS, MOST_WORDS = 60, 200
SENTENCE_END = re.compile(r'[.!?]"?(?=\s)')


class Cast(dict[str, str]):
    """What a paragraph keeps; any other slot is drawn anew wherever it stands, and
    never twice in succession."""

    def __init__(self, rng: random.Random, kept: dict[str, str]):
        super().__init__(kept)
        self.rng = rng
        self.last: dict[str, str] = {}

    def __missing__(self, slot: str) -> str:
        word = self.rng.choice(WORDS[slot])
        while word == self.last.get(slot):
            word = self.rng.choice(WORDS[slot])
        self.last[slot] = word
        return word


def paragraph(rng: random.Random, split: str = "train") -> str:
    """Draw a paragraph of a split, "train" or "text": 60 to 200 words."""
    while True:
        text = rng.choice(KINDS)(rng)
        if not FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
            continue
        if text_is_held_out(beginning(text, 2)) == (split == "text"):
            return text


def beginning(text: str, sentences: int) -> str:
    """The first sentences of a paragraph; its first two decide whether it is held out."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[sentences - 1]]


def _story(rng: random.Random) -> str:
    cast = _cast(rng)
    stages = [
        STORY_OPENING,
        STORY_PLACE,
        STORY_FIND,
        STORY_TROUBLE,
        STORY_HELP,
        STORY_END,
    ]
    sentences = []
    for stage in stages:
        sentences.append(rng.choice(stage))
        if stage is not STORY_END and rng.random() < 0.6:
            sentences.append(rng.choice(STORY_ASIDE))
    # An aside that was drawn twice would read like a mistake.
    return _told(dict.fromkeys(sentences), cast)


def _description(rng: random.Random) -> str:
    cast = _cast(rng)
    middle = rng.sample(PLACE_DETAIL, rng.randint(4, 8))
    return _told([rng.choice(PLACE_OPENING), *middle, rng.choice(PLACE_END)], cast)


def _animal_facts(rng: random.Random) -> str:
    animal, animals, looks, home, food, habit = rng.choice(ANIMALS)
    cast = _cast(rng)
    a_animal = with_article(animal)
    cast |= {"animal": animal, "animals": animals, "Animals": animals.capitalize()}
    cast |= {"a_animal": a_animal, "A_animal": a_animal.capitalize()}
    cast |= {"looks": looks, "home": home, "eats": food, "habit": habit}
    facts = [rng.choice(fact) for fact in rng.sample(ANIMAL_FACTS, 4)]
    return _told([*facts, *rng.sample(ANIMAL_SEEN, rng.randint(3, 5))], cast)


def _trade_facts(rng: random.Random) -> str:
    who, where, makes, tool, begins = rng.choice(TRADES)
    cast = _cast(rng)
    cast |= {"who": who, "where": where, "makes": makes, "tool": tool, "begins": begins}
    cast.last["a_person"] = with_article(who)
    facts = [rng.choice(fact) for fact in rng.sample(TRADE_FACTS, 4)]
    return _told([*facts, *rng.sample(TRADE_DAY, rng.randint(3, 5))], cast)


def _dialogue(rng: random.Random) -> str:
    cast = _cast(rng)
    turns = rng.sample(TURNS, rng.randint(3, 5))
    lines = [line for turn in turns for line in turn]
    return _told([rng.choice(TALK_OPENING), *lines, rng.choice(TALK_END)], cast, "\n")


def _instructions(rng: random.Random) -> str:
    task, needs, steps = rng.choice(TASKS)
    cast = _cast(rng)
    cast |= {"task": task, "needs": needs}
    first = [rng.choice(TASK_OPENING), rng.choice(TASK_NEEDS)]
    last = rng.sample(TASK_END, 2)
    asides = rng.sample(TASK_ASIDE, rng.randint(1, 3))
    asides += [""] * (len(steps) - len(asides))
    rng.shuffle(asides)
    if rng.random() < 0.5:
        numbered = [
            f"{i}. {step[0].upper()}{step[1:]}. {aside}".rstrip()
            for i, (step, aside) in enumerate(zip(steps, asides, strict=True), 1)
        ]
        return _told([" ".join(first), *numbered, " ".join(last)], cast, "\n")
    told = []
    for i, (step, aside) in enumerate(zip(steps, asides, strict=True)):
        word = "First," if i == 0 else "Finally," if i == len(steps) - 1 else "{next}"
        told.append(f"{word} {step}. {aside}".rstrip())
    return _told([*first, *told, *last], cast)


KINDS = (
    _story,
    _story,
    _description,
    _animal_facts,
    _trade_facts,
    _dialogue,
    _instructions,
)


def _cast(rng: random.Random) -> Cast:
    person, other = rng.choice(PERSON), rng.choice(PERSON)
    while other["he"] == person["he"]:
        # One of each, so that a pronoun has one reading.
        other = rng.choice(PERSON)
    kept = {
        slot: rng.choice(WORDS[slot]) for slot in ("place", "thing", "adj", "landscape")
    }
    kept |= {
        f"a_{slot}": with_article(kept[slot]) for slot in ("thing", "adj", "place")
    }
    return Cast(
        rng,
        person
        | {"friend": other["name"], "she": other["he"], "her": other["him"]}
        | kept,
    )


def _told(sentences, cast: Cast, between: str = " ") -> str:
    return between.join(sentence.format_map(cast) for sentence in sentences)


# fmt: off
STORY_OPENING = [
    "{Time}, {name} {went} to the {place} with {a_adj} {thing} under {his} arm.",
    "{name} lived near the {place}, in a house with a {colour} door, and owned {a_adj} {thing}.",
    "There was once {a_person} called {name}, who had nothing but {a_adj} {thing}.",
    "One day, when {weather}, {name} took {a_adj} {thing} and {went} to the {place}.",
    "Nobody in the village knew why {name} always carried {a_adj} {thing}.",
    "{name} had been {feeling} all day, because {his} {adj} {thing} was missing.",
    "For {number} years {name} had worked at the {place}, where {he} guarded {a_adj} {thing}.",
    "When {name} was young, {he} wanted to become {a_person} and to own {a_adj} {thing}.",
    "{name} and {friend} had been friends since they found {a_adj} {thing} at the {place}.",
    "The letter that {name} received was written in {colour} ink, and it spoke of {a_adj} {thing}.",
]
STORY_PLACE = [
    "The {place} stood beside the {landscape}, and {weather}.",
    "It was quiet at the {place}, and only {a_creature} looked up when {name} came in.",
    "At the {place} {he} met {friend}, who was eating {food} and drinking {drink}.",
    "The way to the {place} led along the {landscape}, past an old tower of {material}.",
    "Everyone at the {place} was {feeling} that day, and nobody could say why.",
    "In front of the {place} {a_person} was selling {food} and {food}.",
    "The {place} was closed, so {name} sat down by the {landscape} and waited.",
    "{friend} was already waiting at the {place}, {feeling} and a little {feeling}.",
]
STORY_FIND = [
    "Behind the {screen} {name} noticed the {thing}, and it was {adj} and {colour}.",
    "{Later}, {name} looked at the {thing} more carefully than before.",
    "There, between {number} baskets of {food}, lay the {thing}.",
    "Under the {thing} {he} found {number} coins and a note from {a_person}.",
    "{A_creature} came out of the {place} and sat down next to the {thing}.",
    "\"What {a_adj} {thing}!\" said {friend}. \"May I hold it for a moment?\"",
    "{name} {did} the {thing} {quick} and put it on the table.",
    "Somebody had written the name of {friend} on the {thing}.",
]
STORY_TROUBLE = [
    "But the {thing} was too heavy, and {name} could not carry it alone.",
    "Suddenly {a_creature} jumped over the {barrier}, and the {thing} fell into the water.",
    "Then {a_person} came and said that the {thing} belonged to the {place}.",
    "{Later}, the {entrance} of the {place} was closed, and nobody could open it.",
    "Unfortunately {friend} had forgotten where the {thing} was hidden.",
    "When {name} wanted to go home, {storm}, and the road was no longer safe.",
    "The {thing} was damaged, and {name} was {feeling}.",
    "\"We have only {number} hours left,\" said {friend}, and {she} looked {feeling}.",
]
STORY_HELP = [
    "{friend} thought about it for {number} minutes and then had an idea.",
    "{Later}, {a_person} from the village offered to help them.",
    "Together they {did} the {thing}, and it took them {number} hours.",
    "{name} asked {a_person} for advice, and the advice was good.",
    "{name} took a rope, {friend} took a ladder, and they {went} to the {landscape}.",
    "\"Let me try,\" said {friend}, and {she} {did} the {thing} {quick}.",
    "They shared some {food}, drank {drink} and made a plan.",
    "{name} remembered what {his} grandmother used to say about {idea}.",
]
STORY_END = [
    "{Later}, {name} brought the {thing} home and was {feeling}.",
    "Since that day the {thing} has been kept at the {place}, where everyone can see it.",
    "{name} gave the {thing} to {friend}, and they stayed friends for the rest of their lives.",
    "When they came back to the {place}, {weather}, and everyone was {feeling}.",
    "{name} never told anyone about the {thing}, but {he} often thought of it.",
    "And so {name} learned that {idea} is worth more than {a_adj} {thing}.",
    "{Later}, {friend} wrote a book about the {thing}, and many people read it.",
    "That night {name} slept well, with the {thing} beside {his} bed.",
]
STORY_ASIDE = [
    "{He} was {feeling}, but {he} did not show it.",
    "Far away {a_creature} could be heard.",
    "It smelled of {food} and {drink}.",
    "For a moment nobody spoke.",
    "{name} counted {quick} to {number}.",
    "A {colour} light was burning above the {entrance}.",
    "{Idea} was not what {name} was known for.",
    "Down by the {landscape}, {number} children were singing.",
]
PLACE_OPENING = [
    "The {place} is the oldest building beside the {landscape}.",
    "If you walk past the {landscape}, you come to the {place}.",
    "{name} works at the {place}, which was built of {material} long ago.",
    "There is no {place} in the country that is as {quality} as this one.",
]
PLACE_DETAIL = [
    "Its {part} is made of {material}, and the {part} is painted {colour}.",
    "In summer {number} tables stand in front of it, and people drink {drink} there.",
    "On the wall hangs {a_adj} {thing}, which once belonged to {a_person}.",
    "{name} opens the {place} at {number} o'clock and closes it in the evening.",
    "{A_creature} lives under the roof and comes out at night.",
    "From the {lookout} you can see the {landscape} and the roofs of the town.",
    "Next to it {a_person} has a small shop that sells {food}, {food} and {drink}.",
    "In winter the {lookout} is often covered with snow, and only a {colour} lamp shows the way.",
    "Children come here to look at the {thing}, and {name} tells them its story.",
    "It has {number} rooms, and in the largest one it is always cool and quiet.",
    "A {colour} flag flies from the {lookout} when {a_person} is visiting.",
    "{friend} comes here every week, because {she} likes the smell of {food}.",
]
PLACE_END = [
    "Those who have once been at the {place} will come back, says {name}.",
    "In the evening the {place} is empty, and only the {thing} is left in the dark.",
    "Nobody knows how long the {place} will stand, but {name} is not afraid.",
    "It is a good place for people who believe in {idea} and {idea}.",
]
ANIMAL_FACTS = [
    ["{A_animal} has {looks}.", "People know the {animal} by its {looks}.", "With {looks}, the {animal} is easy to recognise."],
    ["The {animal} lives {home}.", "If you want to find {animals}, look {home}.", "{Animals} are at home {home}."],
    ["It is well known that the {animal} {habit}.", "Not everyone knows that the {animal} {habit}.", "{A_animal} is an animal that {habit}."],
    ["Most {animals} eat {eats}, and they look for it every day.", "The {animal} lives on {eats}.", "The {animal} feeds on {eats}."],
]
ANIMAL_SEEN = [
    "{Time}, {name} saw {a_animal} near the {landscape} and told {friend} about it.",
    "{name} has drawn {number} {animals} in {his} notebook, and each of them is {colour}.",
    "{A_person} once said that {animals} bring luck, but {name} does not believe it.",
    "When {weather}, {name} waited {quick} behind the {screen} until {a_animal} came.",
    "{friend} is a little afraid of {animals}, although {she} has never met one.",
    "At the {place} you can see a picture of {a_animal} next to {a_adj} {thing}.",
    "Whoever wants to watch {animals} needs {idea}, {idea} and a warm coat.",
]
TRADE_FACTS = [
    ["A {who} {makes}.", "Someone who {makes} is called a {who}."],
    ["The work of a {who} begins {begins}.", "Every {who} starts to work {begins}."],
    ["Without {tool}, a {who} could not do much.", "The {who} works with {tool}."],
    ["You can meet a {who} at the {where}.", "The {where} is the place where a {who} works."],
    ["A good {who} needs {idea}, and it takes {number} years to learn everything."],
]
TRADE_DAY = [
    "{name} has been a {who} for {number} years and still likes the work.",
    "{Time}, {friend} came to the {where} and brought {name} {food} and {drink}.",
    "\"I would not want to be {a_person},\" says {name}, \"because I love the {where}.\"",
    "In the corner of the {where} lies {a_adj} {thing}, which {name} bought last year.",
    "When the day is over, {name} is {feeling}, and then {he} goes to the {landscape}.",
    "{friend} would like to become a {who} too, but {she} is not yet old enough.",
    "Once {a_creature} ran through the {where}, and {name} had to laugh.",
]
TALK_OPENING = [
    "{Time}, {name} and {friend} met at the {place}.",
    "{name} was standing in front of the {place} when {friend} came by.",
    "{name} had lost {his} {thing}, so {he} went to see {friend}.",
    "{name} and {friend} were sitting by the {landscape}, and {weather}.",
]
TURNS = [
    ("\"Have you seen my {adj} {thing}?\" {asked} {name}.", "\"Yes,\" {said} {friend}. \"It is lying behind the {screen}.\""),
    ("\"Where are you going with that {thing}?\" {asked} {friend}.", "\"To the {outing},\" {said} {name}. \"{A_person} is waiting for it.\""),
    ("\"I am {feeling} today,\" said {friend}.", "\"Then we should have some {food},\" {said} {name}. \"And perhaps {drink} as well.\""),
    ("\"How much did you pay for the {thing}?\" {asked} {friend}.", "\"Only {number} dollars,\" {said} {name}. \"It is old, but it still works.\""),
    ("\"Did you hear the {creature} last night?\" {asked} {name}.", "\"I did,\" {said} {friend}. \"It was sitting on the {perch} until midnight.\""),
    ("\"Will you come to the {outing} with me?\" {asked} {name}.", "\"Not today,\" {said} {friend}. \"I promised to help {a_person}.\""),
    ("\"What do you need for a good life?\" {asked} {friend}.", "\"{Idea} and {idea},\" {said} {name}, \"and now and then some {food}.\""),
    ("\"Is it true that you want to become {a_person}?\" {asked} {name}.", "\"It was true last year,\" {said} {friend}. \"Now I would rather be {a_person}.\""),
]
TALK_END = [
    "Then they said goodbye, and {name} went home with the {thing}.",
    "They talked until {storm}, and then they walked to the {place} together.",
    "After that neither of them spoke for a while, because both were {feeling}.",
    "{friend} laughed, took the {thing} and {went} away {quick}.",
]
TASK_OPENING = [
    "It is not hard to {task}.",
    "{name} has shown {friend} how to {task}.",
    "If you want to {task}, take your time.",
    "{Time}, {name} decided to {task}.",
]
TASK_NEEDS = [
    "To {task}, you need {needs}.",
    "Before you begin, get {needs}.",
    "You will need {needs}, and a little {idea}.",
]
TASK_ASIDE = [
    "Do not hurry.",
    "{name} likes to sing while doing this.",
    "Ask {a_person} if you are not sure.",
    "{friend} did this {quick} and was {feeling}.",
    "This needs a little {idea}.",
    "It is easier when {friend} helps you.",
]
TASK_END = [
    "If something goes wrong, begin again {quick}.",
    "{name} did it {number} times before it went well.",
    "Afterwards you may have some {food} and {drink}.",
    "Once you know how to {task}, you can teach others.",
    "{friend} says that {idea} is the most important part.",
]
# fmt: on
