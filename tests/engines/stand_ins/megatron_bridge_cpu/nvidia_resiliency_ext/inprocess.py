class CallWrapper:
    pass
