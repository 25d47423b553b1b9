"""The sentence forms of the problems: eight families of story, each with what opens a story,
what may happen in it, and what is asked.

Every story follows one number (things owned, dollars, kilometres, …). A form says how that
number changes, in the question's words and in the answer's. The person whose story it is
is the only one whom a pronoun can mean.

Slots: `a` is the number before the form, `n` and `m` what the form brings, `eq` the equation
of the form, `eq1` the product that comes before it in a form of two steps.

An answer's sentence may be told in several ways, which differ in how it begins; which one is
drawn is all that a question leaves open about its answer.
"""

import re
from dataclasses import dataclass

from training import vocabulary as words
from training.vocabulary import Role

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Form:
    """A sentence form of a question and its counterpart in the answer.

    Attributes:
        op: "" (no step), "+", "−", "×", "÷": a op n = r. "to": n − a = r.
            "×+", "×−": n × m, added to a or taken from it (two steps).
        asks: what the question says.
        tells: what the answer says.
        n: bounds of the operand.
        a: an opening only: bounds of the number that the story starts with.
    """

    op: str
    asks: str
    tells: str
    n: Range = (0, 0)
    a: Range = (12, 85)

    @property
    def steps(self) -> int:
        return 0 if not self.op else 2 if self.op in ("×+", "×−") else 1


@dataclass(frozen=True, slots=True)
class Family:
    """Forms that fit together in every order, and the roles that fill their slots."""

    name: str
    roles: tuple[Role, ...]
    openings: tuple[Form, ...]
    events: tuple[Form, ...]
    questions: tuple[Form, ...]


F = Form
OPENED = ("", "First, ", "We know that ")
GOES_ON = ("", "Then ", "Next, ")
ENDED = ("So ", "Therefore ", "")
"""How the first, any middle and the last sentence of an answer begin."""

MANNERS = (5, 3, 2)
"""How often, in tenths, each of these is drawn: the likeliest is likelier by far, so that greedy text has one reading."""


def begun(beginning: str, sentence: str) -> str:
    """A sentence with its slots open, and a beginning before it."""
    if not beginning:
        return sentence
    if sentence.startswith("{"):
        # Names and numbers are as they are.
        for slot in ("{He}", "{His}"):
            if sentence.startswith(slot):
                return beginning + slot.lower() + sentence.removeprefix(slot)
        return beginning + sentence
    return beginning + sentence[0].lower() + sentence[1:]


_ANY = "|".join(filter(None, (*OPENED, *GOES_ON, *ENDED)))
_BEGINNING = re.compile(rf"(?:^|(?<=[.:] ))(?:{_ANY})")


def without_beginnings(answer: str) -> str:
    """What any two answers to a question have in common: all but how sentences begin, in lower case."""
    return _BEGINNING.sub("", answer).lower()


GROUPS, EACH = (2, 9), (4, 24)
TWICE = (2, 2)

# fmt: off
THINGS = Family(
    "things",
    (words.PERSON, words.FRIEND, words.THING, words.BOX, words.RELATIVE, words.DAY),
    (
        F("", "{name} has {a} {things}.", "{name} starts with {a} {things}."),
        F("", "{name} finds {a} {things} in an old trunk.", "There are {a} {things} in the trunk."),
        F("", "{name} collects {things}. So far {he} has {a} of them.", "{name} has {a} {things} so far."),
        F("×", "{name} owns {a} {boxes} with {n} {things} in each {box}.", "{a} {boxes} with {n} {things} each make {eq} {things}.", EACH, GROUPS),
        F("+", "{name} has {a} old {things} and {n} new ones.", "Old and new {things} together are {eq}."),
        F("×", "On {day}, {name} buys {a} packs of {n} {things}.", "{a} packs of {n} are {eq} {things}.", EACH, GROUPS),
        F("+", "{name} gets {a} {things} from {his} {aunt} and {n} from a neighbour.", "From both of them {name} gets {eq} {things}."),
        F("−", "{name} had {a} {things}, but has lost {n} of them.", "After the loss {name} has {eq} {things}.", a=(30, 99)),
    ),
    (
        F("+", "{He} buys {n} more.", "{He} buys {n} more: {eq}."),
        F("+", "{He} receives {n} {things} as a present.", "The present makes it {eq} {things}."),
        F("+", "Then {he} wins {n} {things} in a game.", "After the game {he} has {eq} {things}."),
        F("−", "{He} gives {n} {things} to {his} {aunt}.", "{He} gives {n} to {his} {aunt}: {eq}."),
        F("−", "One day {he} loses {n} {things}.", "Losing {n} leaves {eq} {things}."),
        F("−", "{He} sells {n} of {his} {things} at the market.", "After the market {he} has {eq} {things}."),
        F("×", "A year later {he} has {n} times as many {things}.", "{n} times as many are {eq} {things}.", (3, 6)),
        F("×", "Then {he} doubles {his} collection.", "Doubling it gives {eq}.", TWICE),
        F("×", "{He} trades each of {his} {things} for {n} smaller ones.", "Each one becomes {n} smaller ones: {eq}.", (3, 5)),
        F("÷", "{He} sorts {his} {things} into {n} equal piles and keeps only one pile.", "One of {n} equal piles has {eq} {things}."),
        F("÷", "{He} keeps half of {his} {things} and gives the rest to {his} school.", "Half of the {things} are {eq}.", TWICE),
        F("÷", "{He} divides {his} {things} equally among {n} children, {himself} included.", "Each of the {n} children has {eq} {things}."),
        F("×+", "{He} buys {n} bags with {m} {things} in each bag.", "The bags hold {eq1} {things}: {eq}."),
        F("×−", "{He} gives {n} friends {m} {things} each.", "The friends get {eq1}, which leaves {eq}."),
    ),
    (
        F("", "How many {things} does {name} have now?", "{name} has {a} {things}."),
        F("", "How many {things} does {he} have in the end?", "{He} has {a} in the end."),
        F("", "What is the number of {things} that {name} has now?", "The number of {things} is {a}."),
        F("÷", "{He} puts all of {his} {things} into {n} {boxes}, the same number into each. How many {things} are in each {box}?", "Each {box} holds {eq} {things}."),
        F("÷", "Exactly {n} {things} fit into one {box}. How many {boxes} does {he} need for all of {his} {things}?", "{He} needs {eq} {boxes}."),
        F("×", "{He} sells all of {his} {things} for {n} dollars each. How many dollars does {he} get?", "The {things} bring {eq} dollars."),
        F("+", "{friend} has {n} more {things} than {name} has now. How many {things} does {friend} have?", "{friend} has {eq} {things}."),
        F("−", "{friend} has {n} fewer {things} than {name} has now. How many {things} does {friend} have?", "{friend} has {eq} {things}."),
        F("+", "{friend} has {n} {things}. How many {things} do the two of them have together?", "Together they have {eq} {things}."),
        F("to", "How many more {things} does {name} need to have {n}?", "{He} still needs {eq} {things}."),
    ),
)

MONEY = Family(
    "money",
    (words.PERSON, words.FRIEND, words.ITEM, words.TICKET, words.CHORE, words.RELATIVE, words.BIG),
    (
        F("", "{name} has {a} dollars.", "{name} starts with {a} dollars."),
        F("", "{name} gets {a} dollars for {his} birthday.", "The birthday brings {a} dollars."),
        F("×", "{name} saves {a} dollars a week for {n} weeks.", "In {n} weeks {name} saves {eq} dollars.", GROUPS, EACH),
        F("×", "{name} works for {n} hours and earns {a} dollars an hour.", "The work pays {eq} dollars.", GROUPS, EACH),
        F("×", "{name} sells {a} old {items} for {n} dollars each.", "The old {items} bring {eq} dollars.", EACH, GROUPS),
        F("+", "In {his} piggy bank {name} has {a} dollars in coins and {n} dollars in notes.", "Coins and notes together are {eq} dollars."),
        F("−", "{name} had {a} dollars, but has lent {n} dollars to {his} {aunt}.", "After lending {n} dollars, {name} has {eq} dollars.", a=(30, 99)),
    ),
    (
        F("+", "{He} earns {n} dollars by {chore}.", "With the money from {chore}, {he} has {eq} dollars."),
        F("+", "{He} finds {n} dollars in an old coat.", "The coat adds {n} dollars: {eq}."),
        F("+", "{He} gets {n} dollars from {his} {aunt}.", "{He} gets {n} dollars: {eq}."),
        F("−", "{He} spends {n} dollars on {a_item}.", "After buying {a_item}, {he} has {eq} dollars."),
        F("−", "{He} pays back {n} dollars that {he} owes.", "Paying back {n} dollars leaves {eq}."),
        F("−", "{He} gives {n} dollars to the animal shelter.", "{He} gives away {n} dollars: {eq}."),
        F("×−", "{He} buys {n} {tickets} for {m} dollars each.", "The {tickets} cost {eq1} dollars, so {eq} dollars are left."),
        F("×+", "{He} works for {n} days and earns {m} dollars a day.", "The {n} days bring {eq1} dollars: {eq}."),
        F("×", "{He} saves until {he} has {n} times as much money.", "{n} times as much is {eq} dollars.", (3, 6)),
        F("×", "A lucky prize doubles {his} money.", "The doubled money is {eq} dollars.", TWICE),
        F("÷", "{He} divides {his} money into {n} equal parts and keeps only one part.", "One of {n} equal parts is {eq} dollars."),
        F("÷", "{He} spends half of {his} money at the fair.", "Half of the money is {eq} dollars.", TWICE),
    ),
    (
        F("", "How many dollars does {name} have now?", "{name} has {a} dollars."),
        F("", "How much money, in dollars, does {he} have in the end?", "{He} has {a} dollars in the end."),
        F("to", "{A_big} costs {n} dollars. How many more dollars does {name} need to buy it?", "{He} still needs {eq} dollars."),
        F("÷", "One {ticket} costs {n} dollars. How many {tickets} can {he} buy with all of {his} money?", "{He} can buy {eq} {tickets}."),
        F("÷", "{He} spends all of {his} money in {n} days, the same amount each day. How many dollars does {he} spend a day?", "Each day {he} spends {eq} dollars."),
        F("+", "{friend} has {n} dollars more than {name} has now. How many dollars does {friend} have?", "{friend} has {eq} dollars."),
        F("−", "{friend} has {n} dollars less than {name} has now. How many dollars does {friend} have?", "{friend} has {eq} dollars."),
        F("×", "{friend} has {n} times as much money as {name} has now. How many dollars does {friend} have?", "{friend} has {eq} dollars.", (3, 6)),
    ),
)

TOUR = Family(
    "tour",
    (words.PERSON, words.TOUR, words.LAKE, words.CASTLE, words.SIGHT),
    (
        F("", "{name} plans a {tour} of {a} kilometres.", "The {tour} starts with {a} kilometres."),
        F("×", "{name} plans a {tour} of {n} days with {a} kilometres a day.", "{n} days are {eq} kilometres.", GROUPS, EACH),
        F("+", "{name} plans a {tour}: {a} kilometres to {lake} and {n} kilometres more to {castle}.", "Both parts together are {eq} kilometres."),
        F("−", "A {tour} of {a} kilometres is too long for {name}, so {he} makes it {n} kilometres shorter.", "The shorter {tour} has {eq} kilometres.", a=(30, 99)),
        F("×", "{name} wants to go around {lake} {n} times, and one round is {a} kilometres.", "{n} rounds are {eq} kilometres.", GROUPS, EACH),
    ),
    (
        F("+", "{He} adds a detour of {n} kilometres to see {sight}.", "With the detour it is {eq} kilometres."),
        F("+", "A closed bridge makes the route {n} kilometres longer.", "The closed bridge adds {n}: {eq}."),
        F("−", "{He} finds a shortcut that saves {n} kilometres.", "The shortcut saves {n}: {eq}."),
        F("−", "{He} leaves out the last {n} kilometres.", "Without the last {n} kilometres it is {eq}."),
        F("×+", "{He} adds {n} more days with {m} kilometres a day.", "The added days are {eq1} kilometres: {eq}."),
        F("×−", "{He} leaves out {n} stretches of {m} kilometres each.", "The stretches are {eq1} kilometres, which leaves {eq}."),
        F("×", "{He} decides to do the whole route {n} times.", "Doing it {n} times makes {eq} kilometres.", (3, 5)),
        F("×", "{He} will also come back the same way, which doubles the distance.", "There and back it is {eq} kilometres.", TWICE),
        F("÷", "Because of the weather {he} cuts the distance in half.", "Half of the distance is {eq} kilometres.", TWICE),
        F("÷", "{He} joins a team of {n} who share the distance equally, so that {he} does only one part.", "One of {n} parts is {eq} kilometres."),
    ),
    (
        F("", "How many kilometres does {name} have to go?", "{name} has to go {a} kilometres."),
        F("", "How long, in kilometres, is {his} way in the end?", "It is {a} kilometres in the end."),
        F("÷", "{He} goes {n} kilometres an hour. How many hours does {he} need?", "{He} needs {eq} hours.", (3, 10)),
        F("÷", "{He} goes the same distance on each of {n} days. How many kilometres does {he} go a day?", "Each day {he} goes {eq} kilometres."),
        F("−", "{name} has already gone {n} kilometres. How many kilometres are still ahead?", "Still ahead are {eq} kilometres."),
        F("×", "Each kilometre takes {n} minutes. How many minutes does {he} need?", "{He} needs {eq} minutes."),
        F("to", "{His} longest {tour} so far was {n} kilometres. By how many kilometres was it longer than this one?", "It was longer by {eq} kilometres."),
    ),
)
# fmt: on
