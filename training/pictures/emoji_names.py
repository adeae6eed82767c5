"""The emoji by plain name, in the order of the atlas.

A word of the lists is a name with `_` for a space; after `=` stands the icon's name in the emoji
sets where it differs. No name is that of a shape.
"""

from __future__ import annotations

_LISTS = {
    "animal": """
        bat bear bee=honeybee bird butterfly camel cat chick=baby-chick chicken cow crab crocodile
        deer dog dolphin duck eagle elephant fish flamingo fox frog giraffe goat gorilla hedgehog
        hippo=hippopotamus horse jellyfish kangaroo koala ladybug=lady-beetle lion lizard llama
        lobster monkey mouse octopus owl panda parrot peacock penguin pig pufferfish=blowfish rabbit
        rhino=rhinoceros rooster scorpion shark sheep=ewe shrimp snail snake spider swan
        dinosaur=t-rex tiger tropical_fish=tropical-fish turkey turtle unicorn whale wolf zebra
        """,
    "food": """
        apple=red-apple avocado bacon baguette=baguette-bread banana beer=beer-mug blueberries bread
        broccoli cake=birthday-cake carrot cheese=cheese-wedge cherries chocolate=chocolate-bar
        coconut coffee=hot-beverage cookie corn=ear-of-corn croissant cupcake donut=doughnut egg
        eggplant fries=french-fries garlic grapes hamburger honey=honey-pot hot_dog=hot-dog
        chili_pepper=hot-pepper ice_cream=soft-ice-cream kiwi=kiwi-fruit lemon lollipop mango
        milk=glass-of-milk onion tangerine pancakes pear pineapple pizza popcorn potato pretzel
        salad=green-salad sandwich strawberry sushi taco tomato waffle watermelon wine=wine-glass
        """,
    "plant": """
        cactus clover=four-leaf-clover maple_leaf=maple-leaf mushroom palm_tree=palm-tree
        pine_tree=evergreen-tree potted_plant=potted-plant rose seedling sunflower
        tree=deciduous-tree tulip
        """,
    "vehicle": """
        airplane ambulance bicycle bus car=automobile fire_truck=fire-engine helicopter motorcycle
        ufo=flying-saucer parachute police_car=police-car race_car=racing-car rocket sailboat
        scooter=kick-scooter ship steam_train=locomotive taxi tractor train truck=delivery-truck
        """,
    "place": """
        castle church circus_tent=circus-tent ferris_wheel=ferris-wheel hospital house
        office=office-building roller_coaster=roller-coaster statue=statue-of-liberty tent volcano
        island=desert-island
        """,
    "clothing": """
        backpack boot=hiking-boot cap=billed-cap crown dress glasses gloves
        graduation_cap=graduation-cap handbag helmet=rescue-workers-helmet
        high_heel=high-heeled-shoe jeans necktie scarf shirt=t-shirt shoe=running-shoe shorts socks
        sunglasses top_hat=top-hat
        """,
    "sport": """
        football=american-football baseball basketball bowling boxing_glove=boxing-glove
        dartboard=bullseye dice=game-die fishing_rod=fishing-pole ice_skate=ice-skate
        medal=sports-medal ping_pong=ping-pong roller_skate=roller-skate skateboard skis
        soccer_ball=soccer-ball tennis trophy volleyball
        """,
    "music": """
        drum guitar headphones=headphone maracas microphone musical_note=musical-note
        piano=musical-keyboard saxophone trumpet violin
        """,
    "weather": """
        cloud droplet fire lightning=high-voltage moon=full-moon rainbow rain=cloud-with-rain
        snowflake snowman=snowman-without-snow sun tornado umbrella
        """,
    "thing": """
        alarm_clock=alarm-clock anchor axe balloon bathtub battery bed bell bomb bone book=open-book
        broom bucket camera candle chair computer=desktop-computer couch=couch-and-lamp
        credit_card=credit-card door envelope feather flashlight floppy_disk=floppy-disk gear
        gift=wrapped-gift globe=globe-showing-americas hammer hourglass=hourglass-done key keyboard
        kite knife=kitchen-knife ladder laptop light_bulb=light-bulb lock=locked
        magic_wand=magic-wand magnet magnifying_glass=magnifying-glass-tilted-left mailbox=postbox
        map=world-map microscope money_bag=money-bag newspaper paint_palette=artist-palette
        paintbrush paperclip pencil phone=telephone pill puzzle_piece=puzzle-piece radio
        ruler=straight-ruler saw=carpentry-saw scale=balance-scale scissors screwdriver scroll
        shield shopping_cart=shopping-cart spoon stopwatch suitcase=luggage
        syringe teapot teddy_bear=teddy-bear television thermometer toilet toothbrush
        traffic_light=vertical-traffic-light trash_can=wastebasket watch wrench yarn
        """,
    "symbol": """
        brain check_mark=check-mark eye fist=oncoming-fist footprints ghost hand=raised-hand nose
        paw_prints=paw-prints pumpkin=jack-o-lantern question_mark=red-question-mark
        exclamation_mark=red-exclamation-mark robot alien skull speech_bubble=speech-balloon
        thumbs_up=thumbs-up thumbs_down=thumbs-down tooth yin_yang=yin-yang clown=clown-face
        """,
}


def _split(word: str) -> tuple[str, str]:
    name, _, icon = word.partition("=")
    return name.replace("_", " "), icon or name.replace("_", "-")


EMOJI_GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(_split(word)[0] for word in words.split()) for group, words in _LISTS.items()
}
EMOJI_NAMES: tuple[str, ...] = tuple(name for names in EMOJI_GROUPS.values() for name in names)
EMOJI_ICONS: tuple[str, ...] = tuple(
    _split(word)[1] for words in _LISTS.values() for word in words.split()
)
