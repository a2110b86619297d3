package rpc

import (
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	// scanBytes is the size of a message up to which its decoding is cheap in any case.
	scanBytes = 4 << 10
	// maxPackedRecords is how often a list of numbers may be continued. Encoders write each list at once.
	maxPackedRecords = 16
	// maxNesting is how deep the messages of the API may be nested.
	maxNesting = 64
)

// codec is gRPC's own codec for protobuf with a bound on the cost of decoding. The decoder copies a list of numbers each time that a
// record continues it, so that 3 MiB of short records would take a processor for more than ten minutes, before anything could
// authenticate the caller.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(encodingproto.Name)} }

// Frame is a message of a stream that a proxy passes on as it came. Nothing is checked in it: the server that it goes to does. It holds the
// received buffers, and SendMsg takes them.
type Frame struct{ data mem.BufferSlice }

// Bytes calls use with the value of a bytes field of the message, without a copy of its own; with nothing if the message does not have the field. The value
// is valid until use returns. It can be called once.
func (f *Frame) Bytes(field protowire.Number, use func([]byte) error) error {
	buf := f.data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	f.data.Free()
	f.data = nil
	var value []byte
	for b := buf.ReadOnlyData(); len(b) > 0; {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errNoMessage
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return errNoMessage
		}
		if number == field && kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(b)
		}
		b = b[n:]
	}
	return use(value)
}

var errNoMessage = status.Error(codes.Internal, "the bytes are no message") // as gRPC says when it cannot decode one

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(*Frame)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	data := f.data
	f.data = nil
	return data, nil
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*Frame); ok {
		data.Ref()
		f.data = data
		return nil
	}
	m, ok := v.(proto.Message)
	if !ok || data.Len() <= scanBytes || !hasPacked(m.ProtoReflect().Descriptor()) {
		return c.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	if err := (&decoded{}).scan(buf.ReadOnlyData(), m.ProtoReflect().Descriptor(), 0); err != nil {
		return err
	}
	return c.CodecV2.Unmarshal(mem.BufferSlice{buf}, v)
}

// decoded is a message that the decoder would make.
type decoded struct {
	records map[protowire.Number]int
	// fields are its messages that are not in a list: the decoder merges all records of one.
	fields map[protowire.Number]*decoded
}

// scan returns an error if the decoder would copy a list too often. Bytes that are no message are left to the decoder.
func (d *decoded) scan(b []byte, desc protoreflect.MessageDescriptor, depth int) error {
	if depth > maxNesting {
		return fmt.Errorf("%s is nested more than %d times", desc.FullName(), maxNesting)
	}
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return nil
		}
		if field := desc.Fields().ByNumber(number); field != nil && kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(b)
			if err := d.record(value, field, depth); err != nil {
				return err
			}
		}
		b = b[n:]
	}
	return nil
}

func (d *decoded) record(value []byte, field protoreflect.FieldDescriptor, depth int) error {
	switch {
	case isPacked(field):
		if d.records == nil {
			d.records = map[protowire.Number]int{}
		}
		if d.records[field.Number()]++; d.records[field.Number()] > maxPackedRecords {
			return fmt.Errorf("%s is continued more than %d times", field.FullName(), maxPackedRecords)
		}
		return nil
	case field.Message() == nil || !hasPacked(field.Message()):
		return nil
	case field.Cardinality() == protoreflect.Repeated:
		return (&decoded{}).scan(value, field.Message(), depth+1)
	}
	if d.fields == nil {
		d.fields = map[protowire.Number]*decoded{}
	}
	in := d.fields[field.Number()]
	if in == nil {
		in = &decoded{}
		d.fields[field.Number()] = in
	}
	return in.scan(value, field.Message(), depth+1)
}

// isPacked reports whether the decoder accepts a field as a list of numbers in one record.
func isPacked(field protoreflect.FieldDescriptor) bool {
	return field.IsList() && field.Message() == nil && field.Kind() != protoreflect.StringKind && field.Kind() != protoreflect.BytesKind
}

// packed has a bool for each message type that was asked for: whether it, or a message in it, has a list of numbers.
var packed sync.Map

func hasPacked(desc protoreflect.MessageDescriptor) bool {
	if has, ok := packed.Load(desc.FullName()); ok {
		return has.(bool)
	}
	has := findPacked(desc, map[protoreflect.FullName]bool{})
	packed.Store(desc.FullName(), has)
	return has
}

func findPacked(desc protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) bool {
	if seen[desc.FullName()] {
		return false
	}
	seen[desc.FullName()] = true
	for i := range desc.Fields().Len() {
		field := desc.Fields().Get(i)
		if isPacked(field) || field.Message() != nil && findPacked(field.Message(), seen) {
			return true
		}
	}
	return false
}
