package rest

import (
	"bytes"
	"encoding/json"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// marshaler is protojson: lowerCamel names, enums as strings, what is unset left out. The one exception is an empty list,
// which is written as such, so that a caller can iterate without asking first.
type marshaler struct{ *runtime.JSONPb }

// Marshal writes v as JSON.
func (m marshaler) Marshal(v any) ([]byte, error) {
	if list, ok := v.(*sandboxv1.ListSandboxesResponse); ok && len(list.GetSandboxes()) == 0 && list.GetNextPageToken() == "" {
		return []byte(`{"sandboxes":[]}`), nil
	}
	raw, err := m.JSONPb.Marshal(v)
	return compact(raw), err
}

// compact takes out the spaces that protojson varies from build to build on purpose: callers compare and grep answers.
func compact(raw []byte) []byte {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return raw
	}
	return out.Bytes()
}
