package wire

// Process describes a process that init has started for an agent, or the sandbox's own, whose Tag is MainTag.
type Process struct {
	Pid      uint32
	Tag      string
	Args     []string
	UID      uint32
	Terminal bool
	// Input reports whether it can be sent input.
	Input bool
	// Started is when it was started, in nanoseconds of the Unix time.
	Started uint64
	// First is the offset of the first byte of its output that is kept, End that of the next one that it writes.
	First, End uint64
	// Exit is how it has ended; nil while it runs.
	Exit *Exit
}

// MainTag is the tag of the sandbox's own process. Its output is not kept here but in the sandbox's log.
const MainTag = "main"

// Exit is how a process has ended.
type Exit struct {
	// Code is its exit code; 128 + Signal if a signal has ended it.
	Code, Signal uint32
	// TimedOut reports whether it was killed because its time was over.
	TimedOut bool
	// At is when it ended, in nanoseconds of the Unix time.
	At uint64
	// User and System are the processor time of it and of the children that it has waited for, in microseconds; MaxRSS is in bytes.
	User, System, MaxRSS uint64
}

const (
	tagProcess         tag = 1
	tagProcessPid      tag = 1
	tagProcessTag      tag = 2
	tagProcessArg      tag = 3
	tagProcessUID      tag = 4
	tagProcessTerminal tag = 5
	tagProcessInput    tag = 6
	tagProcessStarted  tag = 7
	tagProcessFirst    tag = 8
	tagProcessEnd      tag = 9
	tagProcessExit     tag = 10

	tagExitCode     tag = 1
	tagExitSignal   tag = 2
	tagExitTimedOut tag = 3
	tagExitAt       tag = 4
	tagExitUser     tag = 5
	tagExitSystem   tag = 6
	tagExitMaxRSS   tag = 7
)

// EncodeProcesses returns the payload of processes and of started.
func EncodeProcesses(list ...*Process) []byte {
	var b []byte
	for _, p := range list {
		b = appendField(b, tagProcess, string(p.encode()))
	}
	return b
}

func (p *Process) encode() []byte {
	b := appendText(appendNumber(nil, tagProcessPid, p.Pid), tagProcessTag, p.Tag)
	for _, a := range p.Args {
		b = appendField(b, tagProcessArg, a)
	}
	b = appendNumber(b, tagProcessUID, p.UID)
	b = appendFlag(b, tagProcessTerminal, p.Terminal)
	b = appendFlag(b, tagProcessInput, p.Input)
	b = appendLong(b, tagProcessStarted, p.Started)
	b = appendLong(b, tagProcessFirst, p.First)
	b = appendLong(b, tagProcessEnd, p.End)
	if p.Exit != nil {
		b = appendField(b, tagProcessExit, string(EncodeExit(p.Exit)))
	}
	return b
}

// DecodeProcesses reads processes or started. The error is a Failure.
func DecodeProcesses(payload string) ([]*Process, error) {
	var list []*Process
	err := fields(payload, func(t tag, value string) (bool, error) {
		if t != tagProcess {
			return false, nil
		}
		p := &Process{}
		list = append(list, p)
		return true, fields(value, p.decode)
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

func (p *Process) decode(t tag, value string) (known bool, err error) {
	switch t {
	case tagProcessPid:
		err = number(value, &p.Pid)
	case tagProcessTag:
		p.Tag = value
	case tagProcessArg:
		p.Args = append(p.Args, value)
	case tagProcessUID:
		err = number(value, &p.UID)
	case tagProcessTerminal:
		p.Terminal = flag(value)
	case tagProcessInput:
		p.Input = flag(value)
	case tagProcessStarted:
		err = long(value, &p.Started)
	case tagProcessFirst:
		err = long(value, &p.First)
	case tagProcessEnd:
		err = long(value, &p.End)
	case tagProcessExit:
		p.Exit, err = DecodeExit(value)
	default:
		return false, nil
	}
	return true, err
}

// EncodeExit returns the payload of ended.
func EncodeExit(e *Exit) []byte {
	b := appendNumber(nil, tagExitCode, e.Code)
	b = appendNumber(b, tagExitSignal, e.Signal)
	b = appendFlag(b, tagExitTimedOut, e.TimedOut)
	b = appendLong(b, tagExitAt, e.At)
	b = appendLong(b, tagExitUser, e.User)
	b = appendLong(b, tagExitSystem, e.System)
	return appendLong(b, tagExitMaxRSS, e.MaxRSS)
}

// DecodeExit reads ended. The error is a Failure.
func DecodeExit(payload string) (*Exit, error) {
	e := &Exit{}
	err := fields(payload, func(t tag, value string) (bool, error) {
		switch t {
		case tagExitCode:
			return true, number(value, &e.Code)
		case tagExitSignal:
			return true, number(value, &e.Signal)
		case tagExitTimedOut:
			e.TimedOut = flag(value)
			return true, nil
		case tagExitAt:
			return true, long(value, &e.At)
		case tagExitUser:
			return true, long(value, &e.User)
		case tagExitSystem:
			return true, long(value, &e.System)
		case tagExitMaxRSS:
			return true, long(value, &e.MaxRSS)
		}
		return false, nil
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}
