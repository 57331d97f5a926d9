"""The constants of `gamma auto` and of the builder's choice of nodes, with what each does.

Where they were measured, and what half of each changes: docs/notes.md, "Constants of gamma auto". Costs are
in passes of the target over one token.
"""

# How far drafts get (sampling/gamma/acceptance.py)

RECENT = 0.3  # weight of the newest outcome in the recent mean, which follows a change within a few rounds
SHIFT = 0.5  # recent and long mean this far apart: the text has changed
BORROWED = 6.0  # outcomes that the position before is worth as a guess for this one
PRIOR = 0.85  # alpha of the first position before anything is known of the drafter
PROMISED = 0.85  # share of a tree's promised tokens that is accepted, before any tree was seen
PENDING = 64  # rounds kept until an estimate is needed; older ones hardly count

# How much is drafted (sampling/gamma/controller.py)

GAMMA_MAX = 16  # most tokens of a chain
NODES_MAX = 15  # most nodes and levels of a best-first tree: with the root one block of 16 rows in the kernels
GROWTH = 3  # a draft may be this many times as long as the longest whose pass was measured
RATE = 1.5  # tokens in the time of a plain pass, before any are counted
ALLOWANCE = 1.4  # passes that drafting may lose at first: with MARGIN under 3% of 128 tokens, trials included
MARGIN = 0.0125  # passes that drafting may lose for each token
CREDIT = 4.0  # passes that drafting may lose after drafts that paid; for a cascade, this times the loss of one draft
TREE_ALLOWANCE = 0.35  # ALLOWANCE of best-first trees, also the most at an answer's start: 40 tokens lose under 3%
FIRST_DRAFTS = 1.5  # drafts of one token that an answer of best-first trees may lose, if the account holds them
PROBE_ALLOWANCE = 0.7  # passes that a probe may lose beyond the account
BATCH_GAIN = 1.25  # least expected speed-up of drafts in a batch: rows drift apart, and the last ones run alone
PROBES = (3, 1, 7)  # nodes of trees that time wider passes, whatever a node is expected to bring; 1 loses least
REFERENCES = (0, 0, 32, 64, 128)  # rounds until the next plain pass, by how many were timed: T(1) must be known

# Costs of rounds (sampling/gamma/costs.py)

SAMPLES = 15  # latest samples of each figure
EARLIER = 6  # an earlier measurement of drafting counts as this many samples; the warm-up of a pair times eight rounds
EARLIER_PASSES = 2  # samples that an earlier measurement of a pass counts as: between drafts passes take longer
MEASURED = 2  # samples that make a measurement
SLOPE = 0.03  # v(n) − 1 per further token, before it is measured
DRAFT_COST = 0.1  # c, before it is measured
DISTURBED = 1.15  # if T(1) exceeds the least T(n) by this factor, T(1) was disturbed
SLOPE_MEASURED = 4  # once a pass of this width is measured, the measured slope replaces the guessed one
IDLE = 2  # rounds without drafts after which a drafter must first read the tokens that it missed
STALE = 0.02  # relative change of a width's time after which v is computed again
NEWEST = 0.4  # weight of the newest pass in the machine's speed
OUTLIER = 0.7  # a pass that takes e^OUTLIER times as long as expected counts only if the next one does too
RETURN = 0.02  # share of a slowdown that is dropped each pass: a lasting one becomes the normal speed

# How fast ratios are learned (sampling/gamma/ratios.py)

MEMORY = 0.98  # weight that an outcome keeps from round to round: 50 rounds
FIRST = 7 / 3  # outcomes that the first guess is worth: the first real outcome has weight .3
WORTH = 30.0  # outcomes that earlier answers are worth in a new one, at most
RETRY = 8  # rounds after which drafts, or passes of a model, that did not pay are tried again
ANSWER_MEMORY = 0.9  # weight that an answer keeps from answer to answer: ten answers

# Which nodes are drafted, and whether a model runs (sampling/gamma/worth.py, sampling/drafters/proposal.py)

MIN_PATH = 0.03  # paths less likely than this are not drafted
LEAST_PATH = 0.12  # under `gamma auto` a draft head's chain ends once its path is less likely than this
NEXT_PROB = 0.4  # probability assumed for the likeliest token after a node, before the sources give theirs
MAX_PROB = 0.97  # highest probability of a token once noise or a model's offers are taken into account
AFTER_DRAFTED = 0.85  # accepted tokens / offered probability, after accepted drafts
AFTER_DRAFTED_WORTH = 20.0  # outcomes that this guess is worth
MODEL_GAINS = 0.5, 0.1  # tokens that a pass of a model brings where nothing else offers any: at the root, deeper
MODEL_GAIN_WORTH = 10.0  # outcomes that this guess is worth
DEFAULT_PRICE = 0.15  # tokens that a pass of a model costs, before that is measured
CONFIDENT = 0.2  # chance of being accepted, as a block head estimates it, below which nothing is drafted
