"""The words that sensorium-mini can transcribe, in groups that sentences draw from.

Of homophones ("two", "to") at most one may stand in a random string of words, since
nothing around it would show which one was meant: `UNCLEAR_ALONE` holds the others.
"""

from __future__ import annotations


def split(line: str) -> tuple[str, ...]:
    return tuple(line.split())


DIGITS = split("zero one two three four five six seven eight nine")
TEENS = split("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = split("twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = split("first second third fourth fifth sixth seventh eighth ninth tenth")

COLOURS = split("red orange yellow green blue purple pink brown black white gray")
SHAPES = split("circle square triangle star heart diamond cross hexagon ring crescent")
PLURAL_SHAPES = split(
    "circles squares triangles stars hearts diamonds crosses hexagons rings crescents"
)
SIDES = split("top bottom left right center middle corner")
RELATIONS = ("above", "below", "under", "over", "near", "left of", "right of", "next to")
SIZES = split("big small large little")

RANKS = split("ace two three four five six seven eight nine ten jack queen king lady")
SUITS = split("clubs diamonds hearts spades")

DIRECTIONS = split("forward backward left right up down")
DISTANCES = split("meter meters step steps feet")
ROOMS = split("kitchen bedroom bathroom garden office hall garage")
DEVICES = split("light lamp fan heater television radio camera music")
OPENINGS = split("door window box book")

DAYS = split("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = split(
    "january february march april may june july august september october november december"
)
ANIMALS = split("cat dog bird fish horse cow pig sheep duck rabbit mouse lion tiger bear")
PLURAL_ANIMALS = split("cats dogs birds horses cows ducks rabbits")
FOOD = split("apple banana bread butter cheese coffee tea milk water rice egg cake soup")
FAMILY = split("mother father brother sister baby friend boy girl man woman")
WEATHER = split("sunny rainy cloudy windy snowy warm cold hot")
PLACES = split("house school park city shop street river mountain beach")
THINGS = split("car bus train boat tree flower ball phone table chair cup key hat shoe")
ADJECTIVES = split("good bad happy sad new old young fast slow long short nice")
UNITS = split("second seconds minute minutes hour hours day days week weeks")

QUESTION_WORDS = split(
    "what which where how who when why is are was does do can many color shape number word "
    "letter picture video sound thing things it this that these there the a an of on in at to for "
    "and or not say says read written see hear move moves moving way side count name kind time "
    "more most all any other same different behind between plus minus times divided by equals "
    "than much"
)
COMMAND_WORDS = split(
    "turn go stop start wait come back open close play pause set timer alarm off call tell show "
    "give take put make find look listen repeat louder quiet volume please now again around "
    "faster slower next last song hundred degrees percent temperature clock weather today "
    "tomorrow yesterday tonight morning evening night year"
)
EVERYDAY_WORDS = split(
    "hello goodbye hi yes no thank thanks you welcome i am me my your we he she they his her our "
    "have has had want need like love eat drink run walk sleep work help know think let with from "
    "here out into after before very too some every home room world people name rain snow sun moon "
    "sky food hand head eye sorry fine great okay so him"
)
# "Sense and Sensibility", as it is read in Debian's pocketsphinx-testdata.
NOVEL_WORDS = split(
    "and mister john dashwood had then leisure to consider how much there might be prudently in "
    "his power to do for them he was not an ill disposed young man unless rather cold hearted "
    "selfish is married a more amiable woman have been made still respectable than even "
    "himself"
)

# Homophones of two, four, no, here, red, then, hour, eye, or words that shrink to almost nothing.
UNCLEAR_ALONE = frozenset(
    split("to too for know hear read than our i an a the hi or and in of are her his")
)

GROUPS: tuple[tuple[str, ...], ...] = (
    *(DIGITS, TEENS, TENS, ORDINALS, COLOURS, SHAPES, PLURAL_SHAPES, SIDES, RELATIONS, SIZES),
    *(RANKS, SUITS, DIRECTIONS, DISTANCES, ROOMS, DEVICES, OPENINGS, DAYS, MONTHS, ANIMALS),
    *(PLURAL_ANIMALS, FOOD, FAMILY, WEATHER, PLACES, THINGS, ADJECTIVES, UNITS),
    *(QUESTION_WORDS, COMMAND_WORDS, EVERYDAY_WORDS, NOVEL_WORDS),
)
VOCABULARY: tuple[str, ...] = tuple(
    sorted({word for group in GROUPS for entry in group for word in entry.split()})
)
WORDS_OF_RANDOM_STRINGS: tuple[str, ...] = tuple(
    word for word in VOCABULARY if word not in UNCLEAR_ALONE
)
