package wire

// Exec is what a shim sends to the sandbox-init that it has started in the namespaces and the cgroup of a container, for one more process of
// that container. The shim writes it, as a frame, to the socket that init has as SetupFD:
//
//	init                          shim
//	                <------------ exec
//	ready           ------------> with the terminal's master, if there is to be a terminal
//	end of stream   ------------> the command runs: the socket is closed on exec
//
// Instead of ready or the end of the stream, init may send failure, and then it exits.
type Exec struct {
	// Claim is the process. It has no mounts and no host name: those of the container are there already. Its working directory exists.
	Claim *Claim
	// Terminal is the controlling terminal and the standard streams of the process; nil for the streams that init has.
	Terminal *Terminal
}

// Terminal is the size of a terminal, in characters; 0 if it is not known.
type Terminal struct{ Rows, Columns uint16 }

const (
	tagExecClaim    = critical | 1
	tagExecTerminal = critical | 2
)

// EncodeExec returns the payload of an exec. The error is a Failure if init would refuse it.
func EncodeExec(e *Exec) ([]byte, error) {
	if err := e.validate(); err != nil {
		return nil, err
	}
	claim, err := EncodeClaim(e.Claim)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, 4*fieldHeader+len(claim))
	b = appendField(b, tagExecClaim, string(claim))
	if t := e.Terminal; t != nil {
		b = appendNumber(b, tagExecTerminal, t.encode())
	}
	if len(b) > MaxMessage {
		return nil, tooLong()
	}
	return b, nil
}

// DecodeExec reads an exec. Its strings are parts of the payload. The error is a Failure.
func DecodeExec(payload string) (*Exec, error) {
	e := &Exec{}
	err := fields(payload, func(t tag, value string) (known bool, err error) {
		switch t {
		case tagExecClaim:
			if e.Claim != nil {
				return true, malformed("there are two processes")
			}
			e.Claim, err = DecodeClaim(value)
		case tagExecTerminal:
			e.Terminal = &Terminal{}
			err = e.Terminal.decode(value)
		default:
			return false, nil
		}
		return true, err
	})
	if err == nil {
		err = e.validate()
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Exec) validate() error {
	if e.Claim == nil {
		return malformed("there is no process")
	}
	if len(e.Claim.Mounts) > 0 || e.Claim.Hostname != "" {
		return malformed("a further process of a container has no mounts and no host name of its own")
	}
	return nil
}

// EncodeConfinement returns the part of a claim that applies to every process of the container: capabilities, limits, filter, profile, scores.
// Init sends it to its shim, if it has one, before it executes the claim's command. The end of the stream follows when that runs.
func EncodeConfinement(c *Claim) []byte { return c.appendConfinement(nil) }

// DecodeConfinement reads a confinement. The other fields of what it returns are empty. The error is a Failure.
func DecodeConfinement(payload string) (*Claim, error) {
	c := &Claim{}
	if err := fields(payload, c.decodeConfinement); err != nil {
		return nil, err
	}
	if err := c.validateConfinement(); err != nil {
		return nil, err
	}
	return c, nil
}
