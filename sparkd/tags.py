"""Tags: names that requests carry for the kind of traffic they are, under which routing is counted."""

from __future__ import annotations

import re

#: Bytes of a tag at most, and what it is made of; the empty one is none.
MAX_TAG_BYTES = 24
TRAFFIC_TAG = re.compile(rf"[a-z0-9_-]{{0,{MAX_TAG_BYTES}}}")
