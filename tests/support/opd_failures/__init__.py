"""Every failure that the operator answers, as data: what happens, and what has to follow.

Tests run each of them (tests/unit/operator/test_failure_table.py) and docs/failures.md is written from what those runs show
(tools/docs/failures.py): nobody types what the operator does.
"""

from opd_failures.rows_inputs import BEFORE_ANYTHING, CHECK, EDITS
from opd_failures.rows_teachers import PROBE, STUDENT, TEACHERS
from opd_failures.rows_training import CLUSTER, KUBERAY, TRAINER

GROUPS = {
    "accept": BEFORE_ANYTHING,
    "check": CHECK,
    "teachers": (*TEACHERS, *EDITS),
    "probe": PROBE,
    "student": STUDENT,
    "cluster": CLUSTER,
    "kuberay": KUBERAY,
    "trainer": TRAINER,
}
FAILURES = tuple(failure for group in GROUPS.values() for failure in group)
