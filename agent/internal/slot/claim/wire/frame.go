package wire

// Type is the type of a frame.
type Type uint8

// The frames. Numbers are never reused.
const (
	TypeHello       Type = 1
	TypeClaim       Type = 2
	TypeReady       Type = 3
	TypeGo          Type = 4
	TypeFailure     Type = 5
	TypeSetup       Type = 6
	TypeExec        Type = 7
	TypeConfinement Type = 8
	TypeRunning     Type = 9
	TypeSignalMain  Type = 10
	TypeJoin        Type = 11

	// Requests about processes, and their answers.
	TypeStart      Type = 16
	TypeFollow     Type = 17
	TypeInput      Type = 18
	TypeCloseInput Type = 19
	TypeSignal     Type = 20
	TypeResize     Type = 21
	TypeList       Type = 22
	TypeOpen       Type = 23
	TypeStarted    Type = 32
	TypeOutput     Type = 33
	TypeEnded      Type = 34
	TypeProcesses  Type = 35
	TypeDone       Type = 36
)

// HeaderSize is the length of a frame's header.
const HeaderSize = 5

// Frame returns a payload with its header.
func Frame(t Type, payload []byte) []byte {
	return append(AppendHeader(make([]byte, 0, HeaderSize+len(payload)), t, len(payload)), payload...)
}

// AppendHeader appends a frame's header.
func AppendHeader(b []byte, t Type, length int) []byte {
	return appendUint32(append(b, byte(t)), uint32(length))
}

// ParseHeader reads a frame's header. It refuses a payload that is larger than a message may be.
func ParseHeader(header [HeaderSize]byte) (Type, int, error) {
	n := parseUint32(string(header[1:]))
	if n > MaxMessage {
		return 0, 0, &Failure{Stage: StageClaim, Detail: "a frame is larger than allowed"}
	}
	return Type(header[0]), int(n), nil
}

// tag names a field within its message.
type tag uint16

// critical marks a tag that a reader must not skip.
const critical tag = 1 << 15

const fieldHeader = 6

func appendField(b []byte, t tag, value string) []byte {
	b = append(b, byte(t), byte(t>>8))
	b = appendUint32(b, uint32(len(value)))
	return append(b, value...)
}

func appendUint32(b []byte, v uint32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func appendUint64(b []byte, v uint64) []byte {
	return appendUint32(appendUint32(b, uint32(v)), uint32(v>>32))
}

func parseUint32(s string) uint32 {
	return uint32(s[0]) | uint32(s[1])<<8 | uint32(s[2])<<16 | uint32(s[3])<<24
}

func parseUint64(s string) uint64 { return uint64(parseUint32(s)) | uint64(parseUint32(s[4:]))<<32 }

// fields calls take for each field of a message, until take fails or the message is malformed. take reports whether it knows
// the tag. Values are parts of the message: nothing is copied.
func fields(message string, take func(t tag, value string) (known bool, err error)) error {
	for len(message) > 0 {
		if len(message) < fieldHeader {
			return malformed("a field is cut off")
		}
		t, n := tag(message[0])|tag(message[1])<<8, parseUint32(message[2:])
		message = message[fieldHeader:]
		if uint64(n) > uint64(len(message)) {
			return malformed("a field is longer than its message")
		}
		known, err := take(t, message[:n])
		if err != nil {
			return err
		}
		if !known && t&critical != 0 {
			return malformed("a field that must be understood is of a later version")
		}
		message = message[n:]
	}
	return nil
}

func malformed(detail string) error { return &Failure{Stage: StageClaim, Detail: detail} }

// number reads a field of four bytes.
func number(value string, to *uint32) error {
	if len(value) != 4 {
		return malformed("a number is not four bytes long")
	}
	*to = parseUint32(value)
	return nil
}

func appendNumber(b []byte, t tag, v uint32) []byte {
	return appendField(b, t, string(appendUint32(nil, v)))
}

func long(value string, to *uint64) error {
	if len(value) != 8 {
		return malformed("a number is not eight bytes long")
	}
	*to = parseUint64(value)
	return nil
}

// appendLong and the others below append a field that is not the zero value, which a reader assumes without it.
func appendLong(b []byte, t tag, v uint64) []byte {
	if v == 0 {
		return b
	}
	return appendField(b, t, string(appendUint64(nil, v)))
}

func appendText(b []byte, t tag, v string) []byte {
	if v == "" {
		return b
	}
	return appendField(b, t, v)
}

func appendFlag(b []byte, t tag, v bool) []byte {
	if !v {
		return b
	}
	return appendField(b, t, "\x01")
}

func flag(value string) bool { return value != "\x00" }
