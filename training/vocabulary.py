"""Words that the problems draw from: a role is a list of what may fill its slots together."""

Role = list[dict[str, str]]
"""Each entry fills the same slots; they are drawn as one, so that forms agree."""


def listed(words: str) -> list[str]:
    """Words or phrases separated by commas."""
    return [word.strip() for word in words.split(",")]


def nouns(singular: str, plural: str, words: str) -> Role:
    """Nouns as entries: `box/boxes` where the plural is irregular, `_` for a space."""
    role = []
    for word in words.split():
        one, _, many = word.replace("_", " ").partition("/")
        role.append({singular: one, plural: many or one + "s"})
    return role


def choices(slot: str, words: str) -> Role:
    """Entries of one slot, separated by commas."""
    return [{slot: word} for word in listed(words)]


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


GIRLS = listed(
    "Mia, Anna, Lena, Clara, Emma, Nora, Ida, Sofia, Ella, Lucy, Maya, Ruth, Zoe, Alma, Olga, Nina, Tara, "
    "Vera, Amira, Leila, Priya, Yuki, Mei, Rosa, Carmen, Elif, Freya, Ingrid, Hana, Keiko, Daria, Aisha, "
    "Grace, Hazel, Ivy, June"
)
BOYS = listed(
    "Tom, Ben, Paul, Max, Leo, Finn, Jonas, Oscar, Hugo, Emil, Noah, Liam, Adam, Felix, Karl, Ivan, Omar, "
    "Samir, Ravi, Kenji, Wei, Luis, Diego, Mateo, Emre, Lars, Anton, Theo, Jakob, Milan, Yusuf, Peter, "
    "Simon, Victor, Walter, Zaki"
)
SHE = {"he": "she", "his": "her", "him": "her", "himself": "herself"}
HE = {"he": "he", "his": "his", "him": "him", "himself": "himself"}


def _person(name: str, pronouns: dict[str, str]) -> dict[str, str]:
    capitals = {slot.capitalize(): word.capitalize() for slot, word in pronouns.items()}
    return {"name": name, **pronouns, **capitals}


PERSON = [_person(name, SHE) for name in GIRLS] + [_person(name, HE) for name in BOYS]
FRIEND = [{"friend": name} for name in GIRLS + BOYS]
RELATIVE = choices(
    "aunt",
    "aunt, uncle, grandmother, grandfather, brother, sister, cousin, father, mother",
)
DAY = choices("day", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")

THING = nouns(
    "thing",
    "things",
    "marble sticker button coin shell stamp postcard bead pencil crayon ribbon key badge "
    "pebble feather ring card poster puzzle ball doll kite whistle magnet comic bracelet "
    "candle lantern bell crystal fossil toy_car eraser balloon brush/brushes figurine "
    "model_ship spoon thimble bookmark",
)
BOX = nouns(
    "box", "boxes", "box/boxes bag basket jar drawer crate tin case bucket chest sack"
)
ITEM = [
    entry | {"a_item": with_article(entry["item"])}
    for entry in nouns(
        "item",
        "items",
        "book scarf/scarves hat lamp clock umbrella game backpack mug pillow notebook "
        "blanket radio vase shirt belt wallet kettle atlas/atlases apron",
    )
]
TICKET = nouns(
    "ticket",
    "tickets",
    "ticket sandwich/sandwiches pizza cake melon flower_pot comic_book pen ice_cream mango "
    "ruler bus_pass/bus_passes",
)
CHORE = choices(
    "chore",
    "washing cars, walking dogs, raking leaves, cleaning windows, watering plants, "
    "delivering newspapers, selling lemonade, shovelling snow, painting fences, babysitting",
)
BIG = [
    {"A_big": with_article(word).capitalize()}
    for word in listed(
        "bicycle, tent, telescope, guitar, skateboard, camera, keyboard, printer, drum, "
        "microscope, hammock, armchair"
    )
]
TOUR = choices(
    "tour",
    "bicycle tour, hiking trip, motorcycle tour, skiing trip, horse ride, running tour, "
    "tandem tour, scooter trip",
)
LAKE = choices(
    "lake", "the lake, the bay, the forest, the old mill, the hill, the island"
)
CASTLE = choices(
    "castle",
    "the castle, the waterfall, the lighthouse, the cave, the tower, the ruins",
)
SIGHT = choices(
    "sight", "a vineyard, a windmill, an old bridge, a famous garden, a gorge, a dam"
)
HOBBY = [
    {"does": does, "doing": doing}
    for does, doing in [
        ("practises the piano", "practising the piano"),
        ("practises the violin", "practising the violin"),
        ("plays the trumpet", "playing the trumpet"),
        ("plays chess", "playing chess"),
        ("paints", "painting"),
        ("draws", "drawing"),
        ("runs", "running"),
        ("swims", "swimming"),
        ("sings", "singing"),
        ("dances", "dancing"),
        ("knits", "knitting"),
        ("studies Spanish", "studying Spanish"),
        ("studies history", "studying history"),
        ("reads", "reading"),
    ]
]
MUFFIN = nouns(
    "muffin",
    "muffins",
    "muffin cookie pancake waffle bread_roll tart pretzel dumpling cupcake pie biscuit "
    "bun pastry/pastries scone",
)
CHERRY = nouns(
    "cherry",
    "cherries",
    "cherry/cherries raisin almond walnut strawberry/strawberries blueberry/blueberries "
    "raspberry/raspberries hazelnut",
)
TOPIC = choices(
    "topic",
    "whales, volcanoes, bridges, planets, castles, storms, insects, ships, trains, kings, "
    "birds, deserts, inventors, glaciers",
)
CROWD = choices(
    "people",
    "children, visitors, guests, students, tourists, dancers, players, singers, campers, "
    "workers, pupils, hikers, travellers, musicians",
)
PLACE = choices(
    "in_place",
    "in the museum, at the fair, in the park, at the station, on the beach, in the hall, "
    "at the zoo, in the stadium, at the market, at the camp, at the harbour, in the square",
)
GIFT = nouns(
    "gift",
    "gifts",
    "apple orange sandwich/sandwiches banana map flag pear cracker plum",
)
PLANT = nouns(
    "plant",
    "plants",
    "tulip rose lily/lilies daisy/daisies sunflower cabbage carrot onion pumpkin tomato_plant "
    "bean_plant fern violet pepper_plant turnip leek marigold",
)
