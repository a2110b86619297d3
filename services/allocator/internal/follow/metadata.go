package follow

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Numbers of fields, by k8s.io/apimachinery: pkg/runtime/generated.proto and pkg/apis/meta/v1/generated.proto.
const (
	unknownRaw              = 2  // of runtime.Unknown, which is around each answer
	listMetadata            = 1  // of PartialObjectMetadataList
	listItems               = 2  // of PartialObjectMetadataList
	objectMetadata          = 1  // of PartialObjectMetadata
	objectMetaManagedFields = 17 // of ObjectMeta
)

// protobufPrefix is what an answer in protobuf begins with.
const protobufPrefix = "k8s\x00"

// maxItem is the size of an item that no API server sends: etcd keeps no object of 2 MiB.
const maxItem = 64 << 20

var errProtobuf = errors.New("invalid protobuf")

// splitMetadata calls item with each item of a PartialObjectMetadataList in protobuf, and returns the metadata of the list.
func splitMetadata(source io.Reader, item func([]byte) error) (metav1.ListMeta, error) {
	s := &stream{source: bufio.NewReaderSize(source, readSize)}
	prefix, err := s.bytes(uint64(len(protobufPrefix)))
	if err != nil {
		return metav1.ListMeta{}, err
	}
	if string(prefix) != protobufPrefix {
		return metav1.ListMeta{}, fmt.Errorf("%w: the answer begins with %q", errProtobuf, prefix)
	}
	var meta *metav1.ListMeta
	inList := func(number protowire.Number, length uint64) error {
		value, err := s.bytes(length)
		switch {
		case err != nil:
			return err
		case number == listItems:
			return item(value)
		case number == listMetadata:
			meta = &metav1.ListMeta{}
			return meta.Unmarshal(value)
		}
		return nil
	}
	err = s.untilEnd(func(number protowire.Number, length uint64) error {
		if number == unknownRaw {
			return s.within(length, inList)
		}
		_, err := s.bytes(length)
		return err
	})
	switch {
	case err != nil:
		return metav1.ListMeta{}, err
	case meta == nil:
		return metav1.ListMeta{}, fmt.Errorf("%w: a list without metadata", errProtobuf)
	}
	return *meta, nil
}

// stream is an answer that is read while it arrives.
type stream struct {
	source *bufio.Reader
	read   uint64 // bytes
}

// ReadByte implements io.ByteReader.
func (s *stream) ReadByte() (byte, error) {
	b, err := s.source.ReadByte()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	s.read++
	return b, err
}

// bytes reads n bytes.
func (s *stream) bytes(n uint64) ([]byte, error) {
	if n > maxItem {
		return nil, fmt.Errorf("%w: a field of %d bytes", errProtobuf, n)
	}
	s.read += n
	value := make([]byte, n)
	if _, err := io.ReadFull(s.source, value); err != nil {
		return nil, io.ErrUnexpectedEOF
	}
	return value, nil
}

// untilEnd calls f with the number and the length of each field until the stream ends. f reads the field.
func (s *stream) untilEnd(f func(number protowire.Number, length uint64) error) error {
	for {
		if _, err := s.source.Peek(1); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := s.field(f); err != nil {
			return err
		}
	}
}

// within does the same for a message of n bytes.
func (s *stream) within(n uint64, f func(number protowire.Number, length uint64) error) error {
	end := s.read + n
	for s.read < end {
		if err := s.field(f); err != nil {
			return err
		}
	}
	if s.read > end {
		return fmt.Errorf("%w: a field ends after its message", errProtobuf)
	}
	return nil
}

// field reads the beginning of a field. All fields of these messages have a length.
func (s *stream) field(f func(number protowire.Number, length uint64) error) error {
	tag, err := binary.ReadUvarint(s)
	if err != nil {
		return err
	}
	number, kind := protowire.DecodeTag(tag)
	if kind != protowire.BytesType {
		return fmt.Errorf("%w: a field of the wire type %d", errProtobuf, kind)
	}
	length, err := binary.ReadUvarint(s)
	if err != nil {
		return err
	}
	return f(number, length)
}

// decodeMetadata decodes a PartialObjectMetadata, without its managedFields.
func decodeMetadata(item []byte) (*v1alpha1.Sandbox, error) {
	sb := &v1alpha1.Sandbox{}
	err := eachField(item, func(number protowire.Number, _, value []byte) error {
		if number != objectMetadata {
			return nil
		}
		light := value[:0] // in place: what is written was read before
		if err := eachField(value, func(number protowire.Number, field, _ []byte) error {
			if number != objectMetaManagedFields {
				light = append(light, field...)
			}
			return nil
		}); err != nil {
			return err
		}
		return sb.ObjectMeta.Unmarshal(light)
	})
	return sb, err
}

// eachField calls f with each field of a message, and its value if that has a length.
func eachField(message []byte, f func(number protowire.Number, field, value []byte) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		size := protowire.ConsumeFieldValue(number, kind, message[n:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		var value []byte
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(message[n:])
		}
		if err := f(number, message[:n+size], value); err != nil {
			return err
		}
		message = message[n+size:]
	}
	return nil
}
