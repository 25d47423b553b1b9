"""Five further families of story; see `training.stories` for the slots."""

from training import vocabulary as words
from training.stories import EACH, GROUPS, TWICE, Family
from training.stories import Form as F

# fmt: off
PRACTICE = Family(
    "practice",
    (words.PERSON, words.FRIEND, words.HOBBY, words.DAY),
    (
        F("", "On {day}, {name} {does} for {a} minutes.", "{name} begins with {a} minutes."),
        F("×", "{name} {does} for {a} minutes on each of {n} days.", "{n} days of {doing} are {eq} minutes.", GROUPS, EACH),
        F("+", "{name} {does} for {a} minutes in the morning and for {n} minutes in the evening.", "Morning and evening together are {eq} minutes."),
        F("−", "After lunch {name} {does} for {a} minutes, but {n} of these minutes are breaks.", "Without the breaks {name} has {eq} minutes.", (3, 20), (30, 99)),
    ),
    (
        F("+", "The next day {he} spends another {n} minutes on it.", "Another {n} minutes make {eq}."),
        F("+", "After dinner {he} adds {n} minutes.", "With those after dinner there are {eq} minutes."),
        F("−", "{He} takes off {n} minutes because {he} was talking.", "Talking takes off {n}: {eq}."),
        F("−", "{He} does not count {n} minutes of {doing} with the radio on.", "Without the radio there are {eq} minutes."),
        F("×+", "On each of {n} more days {he} spends {m} minutes on it.", "These {n} days bring {eq1} minutes: {eq}."),
        F("×−", "{He} takes off {n} breaks of {m} minutes each.", "The breaks are {eq1} minutes, which leaves {eq}."),
        F("×", "{He} does all of this {n} weeks in a row.", "In {n} weeks it makes {eq} minutes.", (3, 6)),
        F("×", "For a contest {he} doubles the time.", "The doubled time is {eq} minutes.", TWICE),
        F("÷", "For {his} teacher only half of the time counts.", "Half of the time is {eq} minutes.", TWICE),
        F("÷", "All of this time is spread equally over {n} weeks, and only one week counts.", "One of {n} weeks has {eq} minutes."),
    ),
    (
        F("", "How many minutes of {doing} does {name} count in the end?", "{name} counts {a} minutes of {doing}."),
        F("", "How many minutes does {he} write down?", "{He} writes down {a} minutes."),
        F("to", "{His} goal is {n} minutes. How many minutes are still missing?", "Still missing are {eq} minutes."),
        F("÷", "The time that counts is divided into {n} equal lessons. How many minutes long is a lesson?", "A lesson is {eq} minutes long."),
        F("+", "{friend} counts {n} minutes more than {name}. How many minutes does {friend} count?", "{friend} counts {eq} minutes."),
        F("−", "{friend} counts {n} minutes less than {name}. How many minutes does {friend} count?", "{friend} counts {eq} minutes."),
        F("×", "{name} gets {n} points for each minute. How many points does {he} get?", "{He} gets {eq} points."),
    ),
)

BAKING = Family(
    "baking",
    (words.PERSON, words.MUFFIN, words.CHERRY, words.RELATIVE),
    (
        F("", "{name} bakes {a} {muffins}.", "{name} bakes {a} {muffins}."),
        F("×", "{name} bakes {a} trays with {n} {muffins} on each tray.", "{a} trays with {n} each are {eq} {muffins}.", EACH, GROUPS),
        F("+", "For a party, {name} makes {a} {muffins} in the morning and {n} in the afternoon.", "On that day {name} makes {eq} {muffins}."),
        F("−", "{name} makes {a} {muffins}, but {n} of them burn.", "Without the burnt ones there are {eq} {muffins}.", (2, 20), (30, 99)),
        F("×", "{name} has dough in {n} bowls, and each bowl is enough for {a} {muffins}. {He} uses all of it.", "{n} bowls make {eq} {muffins}.", GROUPS, EACH),
    ),
    (
        F("+", "{He} makes {n} more.", "{He} makes {n} more: {eq}."),
        F("+", "{He} gets {n} {muffins} from a neighbour.", "With those of the neighbour {he} has {eq} {muffins}."),
        F("−", "{He} takes {n} {muffins} to {his} {aunt}.", "{His} {aunt} gets {n}: {eq}."),
        F("−", "A hungry dog steals {n} {muffins}.", "The dog leaves {eq} {muffins}.", (2, 12)),
        F("−", "{He} eats {n} {muffins} with {his} friends.", "After eating {n} there are {eq} {muffins}.", (2, 20)),
        F("×+", "{He} bakes {n} more trays with {m} {muffins} on each tray.", "The new trays hold {eq1} {muffins}: {eq}."),
        F("×−", "{He} fills {n} bags with {m} {muffins} each and gives the bags away.", "The bags hold {eq1}, which leaves {eq} {muffins}."),
        F("×", "{He} keeps baking until {he} has {n} times as many {muffins}.", "{n} times as many are {eq} {muffins}.", (3, 5)),
        F("×", "Because more guests are coming, {he} doubles the number of {muffins}.", "Doubling the number gives {eq}.", TWICE),
        F("÷", "{He} keeps half of the {muffins} and takes the others to school.", "Half of the {muffins} are {eq}.", TWICE),
        F("÷", "{He} divides the {muffins} equally among {n} boxes and keeps only one box.", "One of {n} boxes holds {eq} {muffins}."),
    ),
    (
        F("", "How many {muffins} does {name} have now?", "{name} has {a} {muffins}."),
        F("", "How many {muffins} does {he} have in the end?", "{He} has {a} {muffins} in the end."),
        F("÷", "{He} puts all the {muffins} on {n} plates, the same number on each. How many {muffins} are on each plate?", "Each plate has {eq} {muffins}."),
        F("÷", "A bag holds {n} {muffins}. How many bags does {he} need for all the {muffins}?", "{He} needs {eq} bags."),
        F("×", "{He} sells all the {muffins} for {n} dollars each. How many dollars does {he} earn?", "{He} earns {eq} dollars."),
        F("to", "{He} needs {n} {muffins} for the school party. How many more must {he} bake?", "{He} must bake {eq} more."),
        F("×", "On top of each {muffin} {he} puts {n} {cherries}. How many {cherries} does {he} need?", "{He} needs {eq} {cherries}."),
    ),
)

READING = Family(
    "reading",
    (words.PERSON, words.FRIEND, words.TOPIC, words.DAY, words.RELATIVE),
    (
        F("", "{name} wants to read a book of {a} pages about {topic}.", "The book about {topic} has {a} pages."),
        F("×", "{name} has to read {a} chapters of {n} pages each.", "{a} chapters of {n} pages are {eq} pages.", EACH, GROUPS),
        F("+", "For school, {name} must read {a} pages about {topic} and {n} pages about music.", "For school these are {eq} pages."),
        F("−", "{name} has already read {n} of the {a} pages of a book.", "Not yet read are {eq} pages.", a=(30, 99)),
    ),
    (
        F("−", "On {day} {he} reads {n} pages.", "{He} reads {n} on {day}: {eq}."),
        F("−", "Before dinner {he} reads {n} pages.", "After dinner {eq} pages remain."),
        F("−", "{He} skips {n} pages that have only pictures.", "Skipping {n} pages leaves {eq}."),
        F("+", "{He} gets {n} more pages from {his} teacher.", "The teacher adds {n}: {eq}."),
        F("+", "{He} also wants to read a short story of {n} pages.", "With the short story there are {eq} pages."),
        F("×−", "{He} reads {m} pages a day for {n} days.", "In {n} days {he} reads {eq1} pages, so {eq} remain."),
        F("×+", "{He} borrows {n} thin books of {m} pages each to read as well.", "The thin books have {eq1} pages: {eq}."),
        F("×", "A change of plan doubles the number of pages that {he} still has to read.", "Twice the pages are {eq}.", TWICE),
        F("×", "{He} changes to a larger print, in which the pages that {he} still has to read become {n} times as many.", "{n} times as many are {eq} pages.", (3, 5)),
        F("÷", "In the evening {he} reads half of the pages that {he} still has to read.", "Half of the pages are {eq}.", TWICE),
        F("÷", "The pages that {he} still has to read are shared equally among {n} pupils, and {name} is one of them.", "Each of the {n} pupils gets {eq} pages."),
    ),
    (
        F("", "How many pages are now left for {name} to read?", "{a} pages are left."),
        F("", "How many pages does {he} still have to read?", "{He} still has to read {a} pages."),
        F("÷", "From now on {he} reads {n} pages a day. How many days does {he} need to finish?", "To finish {he} needs {eq} days."),
        F("÷", "The pages that {name} has to read now are spread evenly over {n} days. How many pages is that a day?", "That is {eq} pages a day."),
        F("×", "{He} needs {n} minutes for a page. How many minutes does {he} still need to finish?", "To finish {he} needs {eq} minutes."),
        F("+", "{friend} has to read {n} pages more than {name} has to read now. How many pages does {friend} have to read?", "{friend} has to read {eq} pages."),
    ),
)

CROWD = Family(
    "crowd",
    (words.CROWD, words.PLACE, words.GIFT, words.DAY),
    (
        F("", "On {day}, there are {a} {people} {in_place}.", "There are {a} {people}."),
        F("×", "{n} groups of {a} {people} meet {in_place}.", "{n} groups are {eq} {people}.", GROUPS, EACH),
        F("+", "There are {a} {people} from the town and {n} from the villages {in_place}.", "From town and villages there are {eq} {people}."),
        F("−", "Of {a} {people} {in_place}, {n} leave early.", "After that there are {eq} {people}.", a=(30, 99)),
        F("×", "{a} buses, each with {n} {people}, arrive {in_place}.", "The {a} buses bring {eq} {people}.", EACH, GROUPS),
    ),
    (
        F("+", "Then {n} more arrive.", "{n} more arrive: {eq}."),
        F("+", "A train brings {n} more {people}.", "With those from the train there are {eq} {people}."),
        F("−", "After an hour {n} {people} go home.", "Now {n} go home: {eq}."),
        F("−", "A bus takes {n} {people} away.", "The bus leaves {eq} {people} behind."),
        F("×+", "{n} cars arrive with {m} {people} in each car.", "The cars bring {eq1} {people}: {eq}."),
        F("×−", "{n} vans leave with {m} {people} in each van.", "The vans take {eq1}, so {eq} {people} stay."),
        F("×", "Soon there are {n} times as many {people}.", "{n} times as many are {eq} {people}.", (3, 5)),
        F("×", "When the music starts, the number of {people} doubles.", "With the music there are {eq}.", TWICE),
        F("÷", "When it rains, half of the {people} leave.", "The rain leaves {eq} {people}.", TWICE),
        F("÷", "The {people} form {n} equal teams, and all teams but one leave.", "One of {n} teams has {eq} {people}."),
    ),
    (
        F("", "How many {people} are there now?", "There are {a} {people}."),
        F("", "How many {people} are {in_place} in the end?", "There are {a} {people} {in_place} in the end."),
        F("÷", "All the {people} there form {n} teams of the same size. How many {people} are in each team?", "Each team has {eq} {people}."),
        F("÷", "All the {people} there stand in rows of {n}. How many rows are there?", "There are {eq} rows."),
        F("×", "Each of the {people} there gets {n} {gifts}. How many {gifts} are needed?", "This takes {eq} {gifts}."),
        F("to", "There is room for {n} {people} in all. How many more can come?", "There is room for {eq} more."),
        F("×", "Everyone there pays {n} dollars. How many dollars is that in all?", "In all it is {eq} dollars."),
        F("−", "Of the {people} who are there now, {n} wear hats. How many {people} wear no hat?", "Without a hat there are {eq} {people}."),
    ),
)

GARDEN = Family(
    "garden",
    (words.PERSON, words.FRIEND, words.PLANT, words.RELATIVE),
    (
        F("", "{name} has {a} {plants} in {his} garden.", "The garden starts with {a} {plants}."),
        F("×", "{name} plants {a} rows of {n} {plants}.", "{a} rows of {n} are {eq} {plants}.", EACH, GROUPS),
        F("+", "{name} grows {a} {plants} by the fence and {n} by the gate.", "By fence and gate there are {eq} {plants}."),
        F("×", "{name} buys {n} pots with {a} {plants} in each pot.", "{n} pots hold {eq} {plants}.", GROUPS, EACH),
        F("−", "Of {a} {plants} that {name} planted, {n} did not grow.", "That leaves {eq} {plants}.", (2, 30), (30, 99)),
    ),
    (
        F("+", "{He} plants {n} more.", "{He} plants {n} more: {eq}."),
        F("+", "{He} gets {n} {plants} from {his} {aunt}.", "With those from {his} {aunt} there are {eq}."),
        F("−", "Rabbits eat {n} {plants}.", "The rabbits leave {eq} {plants}."),
        F("−", "A storm destroys {n} {plants}.", "After the storm there are {eq} {plants}."),
        F("−", "{He} sells {n} {plants}.", "{He} sells {n}: {eq}."),
        F("×+", "{He} adds {n} rows with {m} {plants} in each row.", "The new rows have {eq1} {plants}: {eq}."),
        F("×−", "{He} gives {n} neighbours {m} {plants} each.", "The neighbours get {eq1}, which leaves {eq}."),
        F("×", "The next spring {he} has {n} times as many {plants}.", "{n} times as many are {eq} {plants}.", (3, 5)),
        F("×", "{He} plants so many more that the number of {plants} doubles.", "Doubling it makes {eq} {plants}.", TWICE),
        F("÷", "A dry summer leaves only half of the {plants}.", "Half of the {plants} are {eq}.", TWICE),
        F("÷", "{He} divides the {plants} equally among {n} gardens, of which only one is {his} own.", "One of {n} gardens has {eq} {plants}."),
    ),
    (
        F("", "How many {plants} does {name} have now?", "{name} has {a} {plants}."),
        F("", "How many {plants} are there in {his} garden in the end?", "There are {a} {plants} in the end."),
        F("×", "Each of {his} {plants} needs {n} cups of water a week. How many cups of water do all of them need a week?", "They need {eq} cups of water."),
        F("÷", "{He} moves all {his} {plants} into {n} beds, the same number into each. How many {plants} are in each bed?", "Each bed has {eq} {plants}."),
        F("÷", "All {his} {plants} stand in rows of {n}. How many rows are there?", "There are {eq} rows."),
        F("to", "{He} wants to have {n} {plants}. How many more must {he} plant?", "{He} must plant {eq} more."),
        F("+", "{friend} has {n} more {plants} than {name} has now. How many {plants} does {friend} have?", "{friend} has {eq} {plants}."),
        F("−", "{friend} has {n} fewer {plants} than {name} has now. How many {plants} does {friend} have?", "{friend} has {eq} {plants}."),
    ),
)
# fmt: on
