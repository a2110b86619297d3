package rpc

// DeltaDelay is how long a delta that is not urgent waits.
const DeltaDelay = deltaDelay
