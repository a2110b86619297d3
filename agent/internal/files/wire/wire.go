// Package wire is the protocol between an agent and the helper of a sandbox, which serves calls about files and ports: frames with a type, a
// length (4 bytes, little endian) and a payload. The helper sends ready on a new connection; an agent that reads the end of the stream
// instead asks for another helper, and nothing has happened. A request is JSON, and the answer is JSON or a failure; data goes in frames, up to the end.
// After the answer to Dial the connection carries the bytes of the connection that was made, without frames.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"
)

// Type is the type of a frame.
type Type byte

// The frames.
const (
	Ready   Type = 'r'
	Request Type = 'q'
	Answer  Type = 'a'
	Failed  Type = 'f'
	Data    Type = 'd'
	End     Type = 'e'
)

const (
	// Chunk is how much data a frame has at most.
	Chunk = 256 << 10
	// Buffer is the size of the send buffer of both sides: a frame is sent while the other side works on the one before.
	Buffer = 4 * Chunk
	// maxPayload is the largest payload of another frame: a page of a directory.
	maxPayload = 16 << 20
	headerSize = 5
)

// The operations.
const (
	Stat         = "stat"
	List         = "list"
	MakeDir      = "mkdir"
	Move         = "move"
	Remove       = "remove"
	Read         = "read"
	Write        = "write"
	Watch        = "watch"
	ReadArchive  = "tar"
	WriteArchive = "untar"
	Dial         = "dial"
)

// Call is a request.
type Call struct {
	Op   string
	Path []byte `json:",omitempty"`
	// NewPath is for Move.
	NewPath []byte `json:",omitempty"`
	// Follow a symbolic link at the end of the path. Recursive is for Remove and Watch. NoReplace and MissingOK refuse, or accept, what is there.
	Follow, Recursive, NoReplace, MissingOK, Append, Parents, Owners bool `json:",omitempty"`
	// Depth, Limit and After are for List: After is the path of the last file of the page before.
	Depth, Limit int    `json:",omitempty"`
	After        []byte `json:",omitempty"`
	Mode         *uint32
	// Offset and Length are for Read, Size for Write.
	Offset, Length int64  `json:",omitempty"`
	Size           *int64 `json:",omitempty"`
	Match          string `json:",omitempty"`
	Owner          string `json:",omitempty"`
	// Modified is for Write: the time of modification of the file.
	Modified *time.Time `json:",omitempty"`
	// Address and Port are for Dial.
	Address string `json:",omitempty"`
	Port    int    `json:",omitempty"`
}

// File describes a file.
type File struct {
	Path, Target []byte
	// Mode has the type and the permissions, as in struct stat.
	Mode     uint32
	Size     int64
	UID, GID uint32
	Modified time.Time
	Etag     string
	Owner    string `json:",omitempty"`
	Group    string `json:",omitempty"`
}

// Result is an answer.
type Result struct {
	File  *File  `json:",omitempty"`
	Files []File `json:",omitempty"`
	More  bool   `json:",omitempty"`
	Made  bool   `json:",omitempty"`
	Count int64  `json:",omitempty"`
	Bytes int64  `json:",omitempty"`
}

// Event is a change of a directory; one for each Data frame.
type Event struct {
	// Kind is started, created, written, removed, moved, attributes or overflow.
	Kind      string
	Path      []byte `json:",omitempty"`
	Directory bool   `json:",omitempty"`
}

// Failure is why a call failed.
type Failure struct { //nolint:errname // the word of the protocol
	// Kind is one of the kinds below; empty for an errno that has none.
	Kind  string
	Errno syscall.Errno
	Path  []byte
	Text  string
}

// The kinds of failures.
const (
	NotRegular = "not a regular file"
	Changed    = "changed"
	Size       = "another size"
	Outside    = "outside of the directory"
	BadArchive = "not an archive"
	NoUser     = "no such user"
	Invalid    = "invalid"
)

// Error implements error.
func (f *Failure) Error() string {
	text := f.Text
	if text == "" {
		text = f.Kind
	}
	if f.Errno != 0 {
		text = f.Errno.Error()
	}
	if len(f.Path) == 0 {
		return text
	}
	return fmt.Sprintf("%q: %s", f.Path, text)
}

// Put writes a frame.
func Put(w io.Writer, t Type, payload []byte) error {
	frame := make([]byte, headerSize+len(payload))
	frame[0] = byte(t)
	binary.LittleEndian.PutUint32(frame[1:], uint32(len(payload)))
	copy(frame[headerSize:], payload)
	_, err := w.Write(frame)
	return err
}

// PutJSON writes a frame with a value.
func PutJSON(w io.Writer, t Type, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return Put(w, t, raw)
}

// Get reads a frame into buffer, or into a larger one, which it returns. The error is io.EOF if there is none.
func Get(r io.Reader, buffer []byte) (Type, []byte, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(header[1:])
	if n > maxPayload || Type(header[0]) == Data && n > Chunk {
		return 0, nil, errors.New("a frame is larger than allowed")
	}
	if cap(buffer) < int(n) {
		buffer = make([]byte, n)
	}
	buffer = buffer[:n]
	if _, err := io.ReadFull(r, buffer); err != nil {
		return 0, nil, errors.Join(io.ErrUnexpectedEOF, err)
	}
	return Type(header[0]), buffer, nil
}

// Header returns what stands before n bytes of a payload.
func Header(t Type, n int) []byte {
	return binary.LittleEndian.AppendUint32([]byte{byte(t)}, uint32(n))
}

// FrameSize is the size of a whole data frame. Payload is where its data goes, and Framed the frame once n bytes are there: data is sent without
// being copied.
const FrameSize = headerSize + Chunk

// Payload returns the part of a frame for its data.
func Payload(frame []byte) []byte { return frame[headerSize:] }

// Framed completes a frame with n bytes of data.
func Framed(frame []byte, t Type, n int) []byte {
	frame[0] = byte(t)
	binary.LittleEndian.PutUint32(frame[1:], uint32(n))
	return frame[:headerSize+n]
}
