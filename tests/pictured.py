"""What captions and questions of the world `shapes` say, read word by word, apart from the package."""

from heedful.multimodal.worlds import COLOURS, QUADRANTS, SHAPES, SIZES


def true_of(caption, things):
    """What a caption says, read word by word."""
    words = caption.split()
    first = [t for t in things if [SIZES[t.size], COLOURS[t.colour], SHAPES[t.shape]] == words[1:4]]
    second = [t for t in things if [SIZES[t.size], COLOURS[t.colour], SHAPES[t.shape]] == words[-3:]]
    if words[4] == "in":
        return any(words[6:] == [("top", "bottom")[t.row // 2], ("left", "right")[t.column // 2]] for t in first)
    sides = {
        "left": lambda a, b: a.column < b.column,
        "right": lambda a, b: a.column > b.column,
        "above": lambda a, b: a.row < b.row,
        "below": lambda a, b: a.row > b.row,
    }
    return any(sides[words[4]](a, b) for a in first for b in second)


def answered(question, things):
    """The answer to a question, read word by word."""
    words = question.split()
    pairs = {(COLOURS[t.colour], SHAPES[t.shape]): t for t in things}
    match words[:2]:
        case ["what", "color"]:
            (one,) = [colour for colour, shape in pairs if shape == words[4]]
            return one
        case ["what", "shape"]:
            (one,) = [shape for colour, shape in pairs if colour == words[4]]
            return one
        case ["how", "many"]:
            return str(sum(words[2] in (SIZES[t.size], SHAPES[t.shape]) for t in things))
        case ["is", "there"]:
            return "yes" if (words[3], words[4]) in pairs else "no"
        case ["where", "is"]:
            thing = pairs[words[3], words[4]]
            return QUADRANTS[2 * (thing.row // 2) + thing.column // 2]
    return "yes" if pairs[words[2], words[3]].column < pairs[words[7], words[8]].column else "no"
