package rest

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
)

// marshaler is protojson: lowerCamel names, enums as strings, unset fields omitted. The one exception is the list of a List
// method: it is present when it is empty, so that a caller can iterate without a check.
type marshaler struct{ *runtime.JSONPb }

// Marshal implements runtime.Marshaler.
func (m marshaler) Marshal(v any) ([]byte, error) {
	raw, err := m.JSONPb.Marshal(v)
	if err != nil {
		return nil, err
	}
	raw = compact(raw)
	if name := emptyList(v); name != "" {
		rest := bytes.TrimPrefix(raw, []byte("{"))
		if len(rest) > 1 {
			rest = append([]byte(","), rest...)
		}
		return append([]byte(`{"`+name+`":[]`), rest...), nil
	}
	return raw, nil
}

// emptyList returns the JSON name of the list of a List method's response if the list is empty, else "".
func emptyList(v any) string {
	m, ok := v.(proto.Message)
	if !ok {
		return ""
	}
	r := m.ProtoReflect()
	if name := string(r.Descriptor().Name()); !strings.HasPrefix(name, "List") || !strings.HasSuffix(name, "Response") {
		return ""
	}
	list := r.Descriptor().Fields().ByNumber(1) // a List method's response begins with its list
	if list == nil || !list.IsList() || r.Get(list).List().Len() > 0 {
		return ""
	}
	return list.JSONName()
}

// compact removes the spaces that protojson adds at random, so that callers can compare answers.
func compact(raw []byte) []byte {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return raw
	}
	return out.Bytes()
}
