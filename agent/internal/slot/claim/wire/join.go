package wire

// Join is what an agent sends to the sandbox-init that an OCI runtime has executed in a container which it runs, to be the supervisor there. Init
// connects to the agent's socket in the door, a directory of the host that the container has for this, and can only read:
//
//	init                          agent
//	hello{version}  ------------>
//	                <------------ join, with the descriptor of the socket that agents will connect to
//	ready           ------------> it supervises
//
// Instead of ready, init may send failure, and then it exits.
type Join struct {
	// Claim is the container's own process, with its confinement. It has no mounts and no host name: those of the container are there already.
	Claim *Claim
	// Again: there was another supervisor before, which has ended. What it had started is lost.
	Again bool
}

const (
	tagJoinClaim = critical | 1
	tagJoinAgain = critical | 2
)

// EncodeJoin returns the payload of a join. The error is a Failure if init would refuse it.
func EncodeJoin(j *Join) ([]byte, error) {
	if err := j.validate(); err != nil {
		return nil, err
	}
	claim, err := EncodeClaim(j.Claim)
	if err != nil {
		return nil, err
	}
	b := appendField(make([]byte, 0, 2*fieldHeader+len(claim)+1), tagJoinClaim, string(claim))
	b = appendFlag(b, tagJoinAgain, j.Again)
	if len(b) > MaxMessage {
		return nil, tooLong()
	}
	return b, nil
}

// DecodeJoin reads a join. Its strings are parts of the payload. The error is a Failure.
func DecodeJoin(payload string) (*Join, error) {
	j := &Join{}
	err := fields(payload, func(t tag, value string) (known bool, err error) {
		switch t {
		case tagJoinClaim:
			if j.Claim != nil {
				return true, malformed("there are two processes")
			}
			j.Claim, err = DecodeClaim(value)
		case tagJoinAgain:
			j.Again = flag(value)
		default:
			return false, nil
		}
		return true, err
	})
	if err == nil {
		err = j.validate()
	}
	if err != nil {
		return nil, err
	}
	return j, nil
}

func (j *Join) validate() error {
	if j.Claim == nil {
		return malformed("there is no process")
	}
	if len(j.Claim.Mounts) > 0 || j.Claim.Hostname != "" {
		return malformed("a container that runs gets no mounts and no host name")
	}
	return nil
}
