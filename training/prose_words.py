"""Words and facts that the prose draws from."""

from training.vocabulary import listed, with_article

WORDS = {
    "time": listed(
        "one morning, one evening, late in the afternoon, before sunrise, after lunch, "
        "at noon, one cold night, on a Sunday, early in spring, in the middle of summer, "
        "on the last day of autumn, one winter day, after school, on the first of May, "
        "shortly before midnight, during the holidays"
    ),
    "later": listed(
        "a little later, after a while, an hour later, soon afterwards, "
        "the next day, that same evening, after some time, a few minutes later"
    ),
    "quick": listed(
        "quickly, slowly, carefully, quietly, calmly, eagerly, silently, patiently, "
        "happily, nervously, proudly, politely, bravely, gently"
    ),
    "adj": listed(
        "small, old, broken, heavy, strange, shiny, dusty, precious, bright, elegant, "
        "painted, forgotten, narrow, round, cheap, beautiful, plain, curious, "
        "enormous, delicate, ancient, famous, ordinary, foreign, unusual, tiny, fine"
    ),
    "colour": listed(
        "red, blue, green, yellow, white, black, brown, grey, purple, pink"
    ),
    "thing": listed(
        "lantern, key, vase, map, kite, clock, basket, violin, mirror, coin, toolbox, "
        "compass, umbrella, bell, book, trumpet, helmet, camera, blanket, knife, bottle, "
        "drum, telescope, hat, medal, globe, typewriter, picture, jar, wallet, shovel, "
        "suitcase, candle, scarf, whistle, notebook, flute, chest, puppet, radio"
    ),
    "place": listed(
        "library, station, bakery, museum, mill, castle, school, theatre, workshop, "
        "church, hospital, lighthouse, town hall, post office, inn, factory, hotel, "
        "pharmacy, bookshop, boathouse, monastery, palace, bank, observatory"
    ),
    "landscape": listed(
        "river, lake, canal, forest, meadow, beach, stream, hill, pond, vineyard, "
        "railway line, market square, old road"
    ),
    "storm": listed(
        "it was raining, a strong wind was blowing, snow was falling, "
        "fog covered the streets, thunder could be heard, it was already dark"
    ),
    "quality": listed(
        "quiet, beautiful, strange, famous, cold, peaceful, cheerful, crowded, mysterious"
    ),
    "material": listed("stone, oak, brick, glass, iron, marble, granite, copper"),
    "went": listed("walked, ran, hurried, strolled, rode, went, wandered, cycled"),
    "weather": listed(
        "the sun was shining, it was raining, a strong wind was blowing, snow was falling, "
        "fog covered the streets, the sky was full of clouds, the air was warm, "
        "thunder could be heard, the stars were out, it was freezing"
    ),
    "feeling": listed(
        "happy, tired, curious, afraid, proud, hungry, surprised, grateful, lonely, "
        "nervous, relieved, angry, sad, cheerful, thirsty"
    ),
    "person": listed(
        "teacher, baker, sailor, doctor, farmer, painter, soldier, nurse, carpenter, "
        "gardener, tailor, fisherman, judge, captain, librarian, cook, shepherd, blacksmith, "
        "musician, postman"
    ),
    "creature": listed(
        "cat, dog, horse, goose, crow, donkey, goat, squirrel, owl, fox, mouse, swan, "
        "rabbit, hedgehog, parrot"
    ),
    "food": listed(
        "bread, cheese, soup, apples, honey, rice, pears, cake, butter, fish, noodles, "
        "plums, eggs, beans, chocolate, cherries"
    ),
    "drink": listed("tea, milk, coffee, water, cocoa, lemonade, apple juice"),
    "part": listed(
        "door, roof, tower, gate, staircase, balcony, chimney, front, floor"
    ),
    "entrance": listed("door, gate, window, staircase, archway"),
    "screen": listed("door, wall, gate, fence, curtain, counter, stove, bench, hedge"),
    "barrier": listed("fence, wall, gate, hedge, bench, table"),
    "perch": listed("roof, wall, gate, fence, balcony, chimney, windowsill"),
    "lookout": listed("roof, tower, balcony, terrace"),
    "said": listed("said, answered, replied, whispered, called"),
    "asked": listed("asked, wondered, inquired"),
    "outing": listed("concert, fair, circus, harvest festival, match, meeting, ball"),
    "next": ["Then", "Next,", "After that,", "Now", "When this is done,"],
    "number": listed("two, three, four, five, six, seven, eight, nine, ten, twelve"),
    "idea": listed(
        "hard work, patience, luck, friendship, courage, silence, time, honesty, practice"
    ),
    "did": listed(
        "cleaned, repaired, measured, washed, examined, wrapped, painted, polished, "
        "weighed, dried, drew, photographed"
    ),
}
WORDS |= {
    f"a_{key}": [with_article(w) for w in WORDS[key]]
    for key in ("adj", "thing", "person", "creature")
}
WORDS |= {
    key.capitalize(): [w[0].upper() + w[1:] for w in WORDS[key]]
    for key in (
        "time",
        "later",
        "quick",
        "weather",
        "idea",
        "a_person",
        "a_creature",
        "number",
    )
}

# fmt: off
ANIMALS = [
    # animal, several, looks, home, food, habit
    ("fox", "foxes", "red fur and a thick tail", "in a den in the ground", "mice and berries", "hunts at night"),
    ("owl", "owls", "large eyes and soft feathers", "in hollow trees", "mice and insects", "can turn its head very far"),
    ("beaver", "beavers", "brown fur and strong teeth", "in a lodge in the water", "bark and leaves", "builds dams of branches"),
    ("hedgehog", "hedgehogs", "short legs and sharp spines", "in hedges and gardens", "worms and beetles", "sleeps through the winter"),
    ("whale", "whales", "smooth skin and a huge body", "in the open sea", "small fish and krill", "comes up to breathe"),
    ("bee", "bees", "thin wings and a striped body", "in a hive", "nectar and pollen", "dances to show the way"),
    ("stork", "storks", "long legs and a red beak", "in a nest on a roof", "frogs and insects", "flies south in autumn"),
    ("camel", "camels", "long legs and a hump", "in the desert", "dry grass and thorns", "can live for days without water"),
    ("penguin", "penguins", "black and white feathers", "on the coasts of the south", "fish and squid", "swims but cannot fly"),
    ("squirrel", "squirrels", "a bushy tail and quick feet", "in the trees of forests and parks", "nuts and seeds", "hides food for the winter"),
    ("frog", "frogs", "wet skin and long back legs", "in ponds and wet meadows", "flies and worms", "lays its eggs in water"),
    ("bear", "bears", "thick fur and long claws", "in forests and mountains", "berries, roots and fish", "rests in a cave in winter"),
    ("swan", "swans", "white feathers and a long neck", "on lakes and slow rivers", "water plants", "guards its nest bravely"),
    ("spider", "spiders", "eight legs and many eyes", "in corners and bushes", "flies and moths", "spins a web of silk"),
    ("horse", "horses", "strong legs and a long mane", "in stables and meadows", "grass, hay and oats", "sleeps standing up"),
    ("crow", "crows", "black feathers and a strong beak", "in fields and towns", "seeds, insects and scraps", "remembers faces for years"),
]
TRADES = [
    # who, place, makes or does, tool, begins
    ("baker", "bakery", "makes bread and cakes", "an oven", "long before sunrise"),
    ("carpenter", "workshop", "builds tables, doors and stairs", "a saw and a plane", "when the wood is dry"),
    ("sailor", "harbour", "works on ships", "ropes and maps", "when the tide is high"),
    ("doctor", "hospital", "helps people who are ill", "a stethoscope", "early in the morning"),
    ("farmer", "farm", "grows wheat and keeps animals", "a tractor", "at five in the morning"),
    ("teacher", "school", "explains the world to children", "books and chalk", "at eight o'clock"),
    ("tailor", "workshop", "sews shirts and coats", "needles and thread", "after breakfast"),
    ("gardener", "park", "takes care of plants", "a spade and a rake", "when the frost is over"),
    ("postman", "post office", "brings letters and parcels", "a bicycle and a bag", "when the streets are still empty"),
    ("fisherman", "harbour", "catches fish", "nets and a boat", "in the dark"),
    ("librarian", "library", "keeps books in order", "a long catalogue", "when the doors open at nine"),
    ("blacksmith", "forge", "shapes hot iron", "a hammer and an anvil", "as soon as the fire is hot"),
    ("beekeeper", "orchard", "looks after hives and sells honey", "a veil and gloves", "on the first warm days"),
    ("miller", "mill", "turns grain into flour", "two heavy stones", "when the wind blows"),
]
TASKS = [
    # to do, needs, steps
    ("make vegetable soup", "carrots, onions, potatoes and a large pot", ("wash the vegetables in cold water", "cut everything into small pieces", "fill the pot with water and bring it to the boil", "put the vegetables into the pot", "add a little salt and pepper", "stir the soup from time to time", "let it cook until the potatoes are soft")),
    ("plant a tree", "a spade, a young tree and a bucket of water", ("choose a place with enough light", "dig a hole that is deep enough for the roots", "loosen the earth at the bottom", "put the tree into the hole and hold it straight", "fill the hole with earth", "press the earth down with your feet", "water the tree well")),
    ("repair a flat tyre", "a pump, a patch and some glue", ("turn the bicycle upside down", "take the wheel off", "pull the tube out of the tyre", "look for the hole", "clean the tube and spread the glue around the hole", "press the patch on and wait", "put the tube back and pump it up")),
    ("bake bread", "flour, water, salt and yeast", ("mix the flour with the salt", "stir the yeast into warm water", "pour the water into the flour", "knead the dough for ten minutes", "let the dough rest under a cloth", "shape a loaf and heat the oven", "bake it until the crust is brown")),
    ("build a birdhouse", "some boards, nails, a saw and a hammer", ("draw the parts on the boards", "cut the parts with the saw", "make a round hole in the front", "nail the walls together", "fix the roof so that no rain comes in", "paint the house in a quiet colour", "hang it high in a tree")),
    ("send a parcel", "a box, paper, tape and a pen", ("put some soft paper into the box", "lay the gift in the middle", "fill the corners with more paper", "close the box with tape", "write the address on it in clear letters", "carry the parcel to the post office", "keep the receipt until it has arrived")),
    ("make tea", "fresh water, tea leaves and a pot", ("boil the water in a kettle", "warm the pot with a little of it", "put the tea leaves into the pot", "pour the hot water over the leaves", "wait for three or four minutes", "pour the tea through a strainer", "add milk or honey if you like")),
    ("clean a room", "a broom, a cloth and some soap", ("open the windows", "put everything that lies on the floor in its place", "take the dust off the shelves", "sweep the floor from the wall to the door", "wipe the table with a wet cloth", "wash the windows", "carry the rubbish out")),
    ("light a campfire", "dry wood, paper, stones and matches", ("look for a place far from the trees", "make a ring of stones", "put paper and thin twigs in the middle", "build a small tent of sticks above them", "light the paper from below", "add larger pieces of wood one by one", "pour water over the fire before you leave")),
    ("paint a fence", "paint, a brush, sandpaper and old newspapers", ("brush the dirt off the fence", "rub the old paint away with sandpaper", "put newspapers on the ground", "stir the paint until it is smooth", "paint from the top to the bottom", "let the first coat dry for a day", "paint the fence a second time")),
    ("take care of a cat", "a basket, two bowls and a brush", ("give it a quiet place to sleep", "fill one bowl with fresh water", "feed it twice a day", "brush its fur once a week", "play with it in the evening", "keep the window closed when you leave", "visit the vet once a year")),
    ("write a letter", "paper, a pen, an envelope and a stamp", ("think of what you want to tell", "write the date at the top", "begin with a friendly greeting", "describe what has happened since the last time", "ask a question at the end", "sign the letter with your name", "fold it and put it into the envelope")),
]
# fmt: on
