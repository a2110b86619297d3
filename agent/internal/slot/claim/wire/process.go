package wire

import "syscall"

// The messages between an agent and the sandbox-init of a running sandbox. After its claim, init listens on at the same socket. Each connection
// of the agent is one call, or several one after another; init answers each request, in order, with done, processes or failure. start and follow
// are answered with started, and then, while requests about that process may still come, which are not answered, with its output and its end:
//
//	agent                         init
//	start or follow ------------>
//	                <------------ started{process}
//	                <------------ output{stream, offset, data}, any number
//	input, signal   ------------>
//	                <------------ ended{exit}
//
// An agent that closes a connection leaves the process as it is. One that does not read stops a process that it follows without loss when the
// process has written as much as init keeps.

// Start is a process to start.
type Start struct {
	// Args is the command line; the first is looked up in the PATH of the environment, within the sandbox, as the user.
	Args []string
	// Env are variables that replace those of the sandbox, or all variables if OnlyEnv.
	Env     []string
	OnlyEnv bool
	// Cwd is the working directory; empty for the sandbox's.
	Cwd string
	// User is user, uid, user:group and so on, according to the sandbox's files; empty for the sandbox's.
	User string
	// Tag names the process; empty for no name. No other process that runs may have it.
	Tag string
	// Input gives it a pipe as its standard input, and not /dev/null.
	Input bool
	// Terminal is its controlling terminal and standard streams; nil for pipes.
	Terminal *Terminal
	// Timeout, in milliseconds, is after what time its process group is killed; zero is never.
	Timeout uint64
	// Buffer is how many bytes of its output are kept; zero is DefaultBuffer.
	Buffer uint32
	// Lossy lets the process run on when this connection does not keep up with its output.
	Lossy bool
	// Kill has the process killed, with its group, when this connection ends before it.
	Kill bool
}

// The bounds of a Start.
const (
	DefaultBuffer = 1 << 20
	MinBuffer     = 4 << 10
	MaxBuffer     = 16 << 20
	MaxTag        = 128
	maxUser       = 256
)

// Target names a process: by its tag, or by its pid in the sandbox if that is empty.
type Target struct {
	Pid uint32
	Tag string
}

// Follow asks for the output of a process from an offset on.
type Follow struct {
	Target Target
	// From is the offset of the first byte that is wanted. What is no longer kept is skipped; the offsets of the output show it.
	From uint64
	// Lossy is that of Start.
	Lossy bool
}

// Request is anything else that is asked about a process.
type Request struct {
	Target Target
	// Signal is for signal; Group sends it to the process group.
	Signal uint32
	Group  bool
	// Terminal is the new size, for resize.
	Terminal Terminal
	// Data is for input, and the user for open: the connection is passed on to the helper of that user.
	Data string
}

// Stream is one of a process's output streams.
type Stream uint8

// The streams.
const (
	Stdout  Stream = 1
	Stderr  Stream = 2
	Console Stream = 3 // of a terminal
)

// OutputHeader is the length of what precedes the data in an output frame.
const OutputHeader = 9

const (
	tagStartArg      = critical | 1
	tagStartEnv      = critical | 2
	tagStartOnlyEnv  = critical | 3
	tagStartCwd      = critical | 4
	tagStartUser     = critical | 5
	tagStartTag      = critical | 6
	tagStartInput    = critical | 7
	tagStartTerminal = critical | 8
	tagStartTimeout  = critical | 9
	tagStartBuffer   = critical | 10
	tagStartLossy    = critical | 11
	tagStartKill     = critical | 12

	tagTargetPid       = critical | 1
	tagTargetTag       = critical | 2
	tagRequestFrom     = critical | 3
	tagRequestLossy    = critical | 4
	tagRequestSignal   = critical | 5
	tagRequestGroup    = critical | 6
	tagRequestTerminal = critical | 7
	tagRequestData     = critical | 8
)

// EncodeStart returns the payload of a start. The error is a Failure if init would refuse it.
func EncodeStart(s *Start) ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	var b []byte
	for _, a := range s.Args {
		b = appendField(b, tagStartArg, a)
	}
	for _, e := range s.Env {
		b = appendField(b, tagStartEnv, e)
	}
	b = appendFlag(b, tagStartOnlyEnv, s.OnlyEnv)
	b = appendText(b, tagStartCwd, s.Cwd)
	b = appendText(b, tagStartUser, s.User)
	b = appendText(b, tagStartTag, s.Tag)
	b = appendFlag(b, tagStartInput, s.Input)
	if t := s.Terminal; t != nil {
		b = appendNumber(b, tagStartTerminal, t.encode())
	}
	b = appendLong(b, tagStartTimeout, s.Timeout)
	b = appendNumber(b, tagStartBuffer, s.Buffer)
	b = appendFlag(b, tagStartLossy, s.Lossy)
	b = appendFlag(b, tagStartKill, s.Kill)
	if len(b) > MaxMessage {
		return nil, tooLong()
	}
	return b, nil
}

// DecodeStart reads a start. Its strings are parts of the payload. The error is a Failure.
func DecodeStart(payload string) (*Start, error) {
	s := &Start{}
	err := fields(payload, func(t tag, value string) (bool, error) {
		switch t {
		case tagStartArg:
			s.Args = append(s.Args, value)
		case tagStartEnv:
			s.Env = append(s.Env, value)
		case tagStartOnlyEnv:
			s.OnlyEnv = flag(value)
		case tagStartCwd:
			s.Cwd = value
		case tagStartUser:
			s.User = value
		case tagStartTag:
			s.Tag = value
		case tagStartInput:
			s.Input = flag(value)
		case tagStartTerminal:
			s.Terminal = &Terminal{}
			return true, s.Terminal.decode(value)
		case tagStartTimeout:
			return true, long(value, &s.Timeout)
		case tagStartBuffer:
			return true, number(value, &s.Buffer)
		case tagStartLossy:
			s.Lossy = flag(value)
		case tagStartKill:
			s.Kill = flag(value)
		default:
			return false, nil
		}
		return true, nil
	})
	if err == nil {
		err = s.validate()
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Start) validate() error {
	if len(s.Args) == 0 || s.Args[0] == "" {
		return &Failure{Stage: StageLookup, Errno: syscall.ENOENT}
	}
	for _, list := range [][]string{s.Args, s.Env} {
		for _, x := range list {
			if hasZero(x) {
				return malformed("an argument or variable has a zero byte in it")
			}
		}
	}
	switch {
	case s.Cwd != "" && !isPath(s.Cwd):
		return &Failure{Stage: StageCwd, Errno: syscall.EINVAL, Detail: "a path that is not absolute or too long"}
	case len(s.User) > maxUser || hasZero(s.User):
		return &Failure{Stage: StageUser, Errno: syscall.EINVAL}
	case len(s.Tag) > MaxTag || s.Tag == MainTag:
		return &Failure{Stage: StageProcess, Errno: syscall.EINVAL, Detail: "a tag that is too long or reserved"}
	case s.Buffer != 0 && (s.Buffer < MinBuffer || s.Buffer > MaxBuffer):
		return &Failure{Stage: StageProcess, Errno: syscall.EINVAL, Detail: "the size of the buffer"}
	}
	return nil
}

// EncodeFollow returns the payload of a follow.
func EncodeFollow(f *Follow) []byte {
	b := appendLong(f.Target.append(nil), tagRequestFrom, f.From)
	return appendFlag(b, tagRequestLossy, f.Lossy)
}

// DecodeFollow reads a follow. The error is a Failure.
func DecodeFollow(payload string) (*Follow, error) {
	f := &Follow{}
	err := fields(payload, func(t tag, value string) (bool, error) {
		switch t {
		case tagRequestFrom:
			return true, long(value, &f.From)
		case tagRequestLossy:
			f.Lossy = flag(value)
			return true, nil
		}
		return f.Target.decode(t, value)
	})
	return f, err
}

// EncodeRequest returns the payload of a request.
func EncodeRequest(r *Request) []byte {
	b := r.Target.append(make([]byte, 0, 64+len(r.Data)))
	b = appendNumber(b, tagRequestSignal, r.Signal)
	b = appendFlag(b, tagRequestGroup, r.Group)
	if r.Terminal != (Terminal{}) {
		b = appendNumber(b, tagRequestTerminal, r.Terminal.encode())
	}
	return appendText(b, tagRequestData, r.Data)
}

// DecodeRequest reads a request. The error is a Failure.
func DecodeRequest(payload string) (*Request, error) {
	r := &Request{}
	err := fields(payload, func(t tag, value string) (bool, error) {
		switch t {
		case tagRequestSignal:
			return true, number(value, &r.Signal)
		case tagRequestGroup:
			r.Group = flag(value)
			return true, nil
		case tagRequestTerminal:
			return true, r.Terminal.decode(value)
		case tagRequestData:
			r.Data = value
			return true, nil
		}
		return r.Target.decode(t, value)
	})
	return r, err
}

func (t *Target) append(b []byte) []byte {
	return appendText(appendNumber(b, tagTargetPid, t.Pid), tagTargetTag, t.Tag)
}

func (t *Target) decode(field tag, value string) (bool, error) {
	switch field {
	case tagTargetPid:
		return true, number(value, &t.Pid)
	case tagTargetTag:
		t.Tag = value
		return true, nil
	}
	return false, nil
}

// AppendOutput appends an output frame's header and all of its payload but the data, of which n bytes follow.
func AppendOutput(b []byte, s Stream, offset uint64, n int) []byte {
	return appendUint64(append(AppendHeader(b, TypeOutput, OutputHeader+n), byte(s)), offset)
}

// DecodeOutput reads an output. The data is a part of the payload. The error is a Failure.
func DecodeOutput(payload string) (s Stream, offset uint64, data string, err error) {
	if len(payload) < OutputHeader {
		return 0, 0, "", malformed("an output is cut off")
	}
	s = Stream(payload[0])
	if s < Stdout || s > Console {
		return 0, 0, "", malformed("an output is of no stream")
	}
	return s, parseUint64(payload[1:]), payload[OutputHeader:], nil
}

func (t *Terminal) encode() uint32 { return uint32(t.Rows)<<16 | uint32(t.Columns) }

func (t *Terminal) decode(value string) error {
	var size uint32
	err := number(value, &size)
	t.Rows, t.Columns = uint16(size>>16), uint16(size)
	return err
}
