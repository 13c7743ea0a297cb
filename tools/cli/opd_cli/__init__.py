"""`opd`: one command line for people who write, check, render and run OPDJobs. Also installed as `kubectl opd`."""
