"""Random lives of OPDJobs on a real API server, and an observer who knows what must never happen in one.

schedule   a seed -> what happens to twenty jobs, their operator and its API server
observer   watches the API server directly; the record of everything, in the order of its versions
world      plays kubelet, scheduler, KubeRay and trainer as a schedule says
proxy      stands between the operator and the API server: fails, delays, loses and cuts
operators  starts operators and ends them: as a task or as a process
invariants the record of one life -> what was broken; pure
round      all of it together, for one seed
"""
