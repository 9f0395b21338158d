"""The checker of annotations: beartype, to which an int is a float as it is to every other checker."""

import beartype

checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
